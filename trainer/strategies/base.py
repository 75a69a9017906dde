"""The protocol between the training loop and a distributed training strategy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from vlmpipe.trainer.dataloading.batches import MicroBatches, PackedBatch

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from vlmpipe.trainer.strategies.mixed_precision import LossScale


@dataclass(frozen=True)
class StepResult:
    """Outcome of one optimizer step. `grad_norm` is the global norm before clipping.

    A step whose gradients overflow fp16 is skipped: its norm is not finite and no weight changes.
    """

    grad_norm: Tensor | float
    skipped: bool = False


class SavedFiles(Protocol):
    """The files of a checkpoint. What is read of them is what was saved."""

    @property
    def sizes_bytes(self) -> Mapping[str, int]: ...

    def read(self, file: str) -> memoryview: ...


class Strategy(Protocol):
    """A distributed training strategy, built from a module whose weights are equal on all ranks."""

    checkpoint_format: str

    def forward_backward(self, batches: MicroBatches, total_label_tokens: int) -> Tensor:
        """Accumulate the gradients of one global step from this rank's micro-batches.

        Returns this rank's share of the loss: its summed token loss / the label tokens of ALL ranks and micro-batches.
        The shares of all ranks add up to the loss of the global step, also where several ranks hold one model replica.
        """
        ...

    def forward_loss(self, batch: PackedBatch) -> Tensor:
        """This rank's share of the summed token loss of one micro-batch, without gradients or dropout. Collective."""
        ...

    def averaged(self) -> AbstractContextManager[None]:
        """Let `forward_loss` use the averaged weights of `train.ema_decay` inside this context. Collective."""
        ...

    def step(self, rate_factor: float) -> StepResult:
        """Clip by the global norm, update at `rate_factor` of the peak learning rates, clear the gradients.

        Updates the averaged weights too, unless the step is skipped.
        """
        ...

    def learning_rate(self) -> float: ...

    @property
    def loss_scale(self) -> LossScale: ...

    def snapshot(self, folder: Path, group: ProcessGroup) -> Callable[[], None]:
        """Copy this rank's state for its node's staging folder. Collective.

        Returns a function that writes it, to be called on all ranks, from any thread, while training continues.
        `group` is a process group reserved for that.
        """
        ...

    def reads(self, files: SavedFiles) -> dict[str, list[tuple[int, int]]]:
        """First byte and the one after the last of each range that `load` reads on this rank, by file."""
        ...

    def load(self, folder: Path) -> None:
        """Load the state from a folder with the checkpoint's files. Collective.

        What `reads` names is there and verified. The rest of a file may be zeros, and a file that no rank of this node
        reads may be empty.
        """
        ...
