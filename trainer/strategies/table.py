"""The seam between the loop and distribution, and the table of strategies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from trainer.batches import RowBatch
from trainer.config import TrainConfig
from trainer.models.table import Blocks
from trainer.worker import Worker

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did. `grad_norm` is the global norm before clipping."""

    grad_norm: Tensor | float


class Strategy(Protocol):
    """One way to train. Built from a module whose weights are equal on all ranks."""

    checkpoint_format: str

    def forward_backward(self, batches: Sequence[RowBatch], total_label_tokens: int) -> Tensor:
        """Gradients of one global step from this rank's micro-batches.

        Returns this rank's share of the loss (its summed token loss / the label tokens of ALL ranks and
        micro-batches); the sum over ranks is the loss of the global step, whatever the accumulation or the world size.
        """
        ...

    def step(self, rate_factor: float) -> StepResult:
        """Clip by the global norm, update at `rate_factor` of the peak learning rates, clear the gradients."""
        ...

    def learning_rate(self) -> float: ...

    def save(self, folder: Path) -> None:
        """Write this rank's part of the state into its node's staging folder. Collective."""
        ...

    def load(self, folder: Path) -> None:
        """Take the state from a folder that holds every rank's files. Collective; the files are already verified."""
        ...


def build_strategy(config: TrainConfig, module: nn.Module, blocks: Blocks, worker: Worker) -> Strategy:
    """The strategy that `train.strategy` names. Imports are here: DeepSpeed alone takes a second."""
    return _table()[config.strategy](config, module, blocks, worker)


def strategy_names() -> list[str]:
    """Every entry of the table; the equality tests run over it."""
    return sorted(_table())


def _table() -> dict[str, Callable[[TrainConfig, nn.Module, Blocks, Worker], Strategy]]:
    def ddp(config: TrainConfig, module: nn.Module, blocks: Blocks, worker: Worker) -> Strategy:
        from trainer.strategies.ddp import Ddp

        return Ddp(config, module, worker)

    def fsdp(config: TrainConfig, module: nn.Module, blocks: Blocks, worker: Worker) -> Strategy:
        from trainer.strategies.fsdp import Fsdp

        return Fsdp(config, module, blocks, worker)

    def zero2(config: TrainConfig, module: nn.Module, blocks: Blocks, worker: Worker) -> Strategy:
        from trainer.strategies.deepspeed import Zero

        return Zero(config, module, worker, stage=2)

    return {"ddp": ddp, "fsdp": fsdp, "zero2": zero2}
