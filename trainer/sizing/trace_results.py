"""Results of tracing a step or a pipeline stage. Imports no torch: the planner reads cached ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# autocast: fp32 weights, cast by each operation in bf16. bf16 weights: all of them. bf16 parts: those that FSDP casts,
# which leaves alone parts in which nothing is trained.
Compute = Literal["fp32", "autocast", "bf16 weights", "bf16 parts"]
Category = Literal["weight copies", "vision", "language", "head", "backward", "offloaded"]


@dataclass(frozen=True)
class Held:
    """Bytes in use at one moment, without parameters, gradients and inputs. "offloaded": in the machine's memory."""

    bytes_by_category: dict[Category, int]

    @property
    def total_bytes(self) -> int:
        return sum(count for name, count in self.bytes_by_category.items() if name != "offloaded")


@dataclass(frozen=True)
class StepTrace:
    """Peaks of a forward pass, and of the backward pass until the first gradient of a weight (`turn`) and after it."""

    forward: Held
    turn: Held
    backward: Held
    input_bytes: int


@dataclass(frozen=True)
class StageTrace:
    """Bytes that one micro-batch adds, without the stage's inputs from the previous stage."""

    forward: Held  # peak of the forward pass
    saved: Held  # between forward and backward pass
    backward: Held  # peak of the backward pass
    passed_on_bytes: int  # hidden states for the next stage
    input_bytes: int  # from the stage's own batches
