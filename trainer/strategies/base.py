"""The Strategy protocol between the training loop and distribution."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from trainer.dataloading.batches import PackedBatch

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from trainer.strategies.mixed_precision import LossScale


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did. `grad_norm` is the global norm before clipping.

    A step is skipped when its gradients overflow fp16; its norm is not finite, and no weight has changed.
    """

    grad_norm: Tensor | float
    skipped: bool = False


class Strategy(Protocol):
    """One way to train. Built from a module whose weights are equal on all ranks."""

    checkpoint_format: str

    def forward_backward(self, batches: Sequence[PackedBatch], total_label_tokens: int) -> Tensor:
        """Gradients of one global step from this rank's micro-batches.

        Returns this rank's share of the loss (its summed token loss / the label tokens of ALL ranks and
        micro-batches); the sum over ranks is the loss of the global step, whatever the accumulation or the world size.
        Where several ranks hold one copy of the model and see the same rows, their shares add up to that copy's.
        """
        ...

    def forward_loss(self, batch: PackedBatch) -> Tensor:
        """Summed token loss of one micro-batch, of the model as it is: no gradients, no dropout. Collective.

        Where several ranks hold one copy of the model, each returns the copy's whole loss.
        """
        ...

    def averaged(self) -> AbstractContextManager[None]:
        """Have `forward_loss` see the average of the weights in here, where `train.ema_decay` keeps one. Collective."""
        ...

    def step(self, rate_factor: float) -> StepResult:
        """Clip by the global norm, update at `rate_factor` of the peak learning rates, clear the gradients.

        The average of the weights, where one is kept, follows an update that was not skipped.
        """
        ...

    def learning_rate(self) -> float: ...

    @property
    def loss_scale(self) -> LossScale: ...

    def snapshot(self, folder: Path, group: ProcessGroup) -> Callable[[], None]:
        """Take this rank's state as it is now, to be written into its node's staging folder. Collective.

        Returns what writes it, or what is left to write; to be called on all ranks, in any thread, while training goes
        on. `group` is for that alone.
        """
        ...

    def load(self, folder: Path) -> None:
        """Take the state from a folder that holds every rank's files. Collective; the files are already verified."""
        ...
