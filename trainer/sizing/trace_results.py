"""Results of tracing a step or a stage. No torch here: the planner reads cached ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# autocast: fp32 weights, cast where an operation computes in bf16 (DDP, ZeRO).
# bf16 weights: the strategy hands the module weights that are bf16 already (FSDP).
Compute = Literal["fp32", "autocast", "bf16 weights"]
Category = Literal["weight copies", "vision", "language", "head", "backward"]


@dataclass(frozen=True)
class Held:
    """Bytes held at one moment by category, without parameters, gradients and the inputs."""

    bytes_by_category: dict[Category, int]

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes_by_category.values())


@dataclass(frozen=True)
class StepTrace:
    """The fullest moments of a forward pass, of the backward pass before the first gradient of a weight is there, and
    of what comes after it."""

    forward: Held
    turn: Held
    backward: Held
    input_bytes: int


@dataclass(frozen=True)
class StageTrace:
    """Bytes that one micro-batch adds, without what the stage receives."""

    forward: Held  # at the fullest moment of the forward pass
    kept: Held  # between forward and backward pass
    backward: Held  # at the fullest moment of the backward pass
    passed_on_bytes: int  # of the hidden states between stages
    input_bytes: int  # of what the stage takes from its own batches
