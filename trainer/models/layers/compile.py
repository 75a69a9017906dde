"""Compiles layers one by one with torch.compile (`train.compile`).

What is compiled is a layer's forward and its gradient, with the activation checkpointing in it. Hooks that strategies
put around a layer run as they are, and names in checkpoints stay. Layers that are alike share their code. A tower's
layers are compiled in pieces: transformers collects their hidden states by hooks that torch.compile cannot follow.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trainer.config.train import CompileBackend
from trainer.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

    from trainer.models.base import ShardingUnits

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
MOST_VARIANTS = 64  # of one layer's code before torch runs it as it is; its own default, 8, is few for towers


def compile_layers(blocks: ShardingUnits, backend: CompileBackend) -> None:
    """Have layers compiled when they first run. Before a strategy changes the module.

    Rows have one length, so each number of rows is compiled for itself; images of a micro-batch are as many as there
    are, so a tower's layers are compiled for any number of them. Raises ConfigError where inductor has no C++ compiler.
    """
    import torch._dynamo

    if backend == "inductor":
        _require_compiler()
        os.environ.setdefault(CACHE_VARIABLE, str(cache_folder()))
    torch._dynamo.config.recompile_limit = max(MOST_VARIANTS, torch._dynamo.config.recompile_limit)
    torch._dynamo.config.optimize_ddp = False  # layers are smaller than what DDP would cut them into
    for layers, dynamic in ((blocks.language_layers, False), (blocks.tower_layers, None)):
        compiled = torch.compile(_forward, backend=backend, dynamic=dynamic)
        for layer in layers:
            layer.forward = functools.partial(compiled, layer)


def compiled_graphs() -> int:
    """How many graphs this process has compiled. It stops growing when every shape of rows has been seen."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def cache_folder() -> Path:
    """Where inductor keeps what it has compiled: a folder of its own for each environment, which no other user writes
    to, for what lies there is run."""
    environment = f"{sys.prefix} {sys.version} {torch.__version__}"
    return Path.home() / ".cache/vlmpipe" / f"inductor-{hashlib.sha256(environment.encode()).hexdigest()[:16]}"


def _forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    # By the class that the layer has when it runs: FSDP gives it one of its own, and transformers checkpoints
    # activations in the outermost class only.
    return type(layer).forward(layer, *args, **kwargs)


def _require_compiler() -> None:
    name = os.environ.get("CXX", "g++")
    if shutil.which(name) is None:
        raise ConfigError(
            f"train.compile needs a C++ compiler, and {name} is not on the PATH",
            expected="g++ on every machine, or CXX with the name of another compiler",
            fix="take the trainer image, or train without train.compile",
        )
