"""Check whether layers are compiled (`train.compile`). The planner and the trainer ask the same function."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from vlmpipe.trainer.config.strategies import COMPILING

if TYPE_CHECKING:
    from vlmpipe.trainer.config.train import TrainConfig

# Where compiling pays. Read in ml-engineering, 2026-08, one B200: a 1B model took 58.8 ms a step of 512 tokens and 18.7
# compiled, an 8B model at 8,192 tokens 637 ms and 674 compiled. It saves the time between and in small kernels.
MAX_PARAMETERS = 3_000_000_000
MAX_TOKENS = 4096  # of a micro-batch
MIN_FOR_FLOAT8 = 8.9  # compute capability: Ada (L4), Hopper and newer


@dataclass(frozen=True)
class CompileChoice:
    """The resolved `train.compile`."""

    state: Literal["on", "off"]
    why: str

    @property
    def on(self) -> bool:
        return self.state == "on"


def compile_choice(
    train: TrainConfig,
    *,
    on_gpu: bool,
    parameters: int,
    sequence_length: int,
    quantizes_base: bool,
    has_compiler: bool = True,
) -> CompileChoice:
    """Resolve `train.compile`. `parameters` are those of the whole model, frozen ones included."""
    if train.compile != "auto":
        return CompileChoice(train.compile, f"the run file sets train.compile {train.compile}")
    if train.strategy not in COMPILING:
        return CompileChoice("off", f"it does not work with strategy {train.strategy}")
    if train.activation_offloading:
        return CompileChoice("off", "compiled layers would hide their inputs from train.activation_offloading")
    if quantizes_base:
        return CompileChoice("off", "torch.compile cannot trace the kernels of a 4-bit base")
    if not on_gpu:
        return CompileChoice("off", "on a CPU it takes longer than it saves")
    if train.float8 != "none":
        return CompileChoice("on", f"train.float8 {train.float8} needs fused kernels")
    if not has_compiler:
        return CompileChoice("off", "this machine has no C++ compiler")
    tokens = train.micro_batch_size * sequence_length // train.context_parallel
    size = f"{parameters / 1e9:.2g}B parameters and {tokens:,} tokens a micro-batch"
    if parameters < MAX_PARAMETERS or tokens <= MAX_TOKENS:
        return CompileChoice("on", f"{size}: kernels are small")
    return CompileChoice("off", f"{size}: kernels are large enough without it")
