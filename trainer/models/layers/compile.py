"""Compiles layers one by one with torch.compile (`train.compile`).

Compiled code covers a layer's forward and backward pass with its activation checkpointing, not the hooks of strategies.
Names in checkpoints stay the same, and equal layers share code. Tower layers are compiled in pieces: transformers
collects their hidden states by hooks that torch.compile cannot trace.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from vlmpipe.trainer.config.train_options import CompileBackend
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.storage.base import cache_folder as private_folder
from vlmpipe.trainer.storage.user_folders import cache_of_user

if TYPE_CHECKING:
    from torch import nn

    from vlmpipe.trainer.models.base import ShardingUnits

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
MAX_VARIANTS = 64  # of one layer's code before torch stops compiling it; its default of 8 is too few for towers


def compile_layers(blocks: ShardingUnits, backend: CompileBackend, *, must: bool = True) -> None:
    """Have layers compiled when they first run; without `must`, what cannot be compiled runs as it is, with a warning.
    Call it before a strategy changes the module.

    Packed sequences have one length, so language layers are compiled for each batch size; numbers of images vary, so
    tower layers are compiled for any. Raises ConfigError where inductor has no C++ compiler.
    """
    import torch._dynamo

    if backend == "inductor":
        if not has_compiler():
            raise ConfigError(
                f"train.compile needs a C++ compiler, and {_compiler()} is not on the PATH",
                expected="g++ on every machine, or CXX with the name of another compiler",
                fix="take the trainer image, or set train.compile to off",
            )
        os.environ.setdefault(CACHE_VARIABLE, str(cache_folder()))
    torch._dynamo.config.suppress_errors = not must
    torch._dynamo.config.recompile_limit = max(MAX_VARIANTS, torch._dynamo.config.recompile_limit)
    torch._dynamo.config.optimize_ddp = False  # a layer is smaller than the pieces DDP would cut
    for layers, dynamic in ((blocks.language_layers, False), (blocks.tower_layers, None)):
        compiled = torch.compile(_forward, backend=backend, dynamic=dynamic)
        for layer in layers:
            layer.forward = functools.partial(compiled, layer)


def compiled_graphs() -> int:
    """Graphs compiled by this process so far; constant once every shape has been seen."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def cache_folder() -> Path:
    """Inductor's cache: one for each environment, in a folder that only the user writes: its content is executed."""
    environment = f"{sys.prefix} {sys.version} {torch.__version__}"
    return (cache_of_user() or private_folder()) / f"inductor-{hashlib.sha256(environment.encode()).hexdigest()[:16]}"


def _forward(layer: nn.Module, *args: object, **kwargs: object) -> object:
    # Look up the class when the layer runs: FSDP replaces it, and transformers checkpoints activations in the outermost
    # class only.
    return type(layer).forward(layer, *args, **kwargs)


def has_compiler() -> bool:
    """Return whether this machine has the C++ compiler that inductor needs."""
    return shutil.which(_compiler()) is not None


def _compiler() -> str:
    return os.environ.get("CXX", "g++")
