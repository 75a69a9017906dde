"""Steps on all samples of an epoch, in packed sequences."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.support.timing import Clock, Measured
from vlmpipe.trainer.data.sampler import EpochTotals
from vlmpipe.trainer.dataloading.batches import PackedBatch
from vlmpipe.trainer.strategies.base import Strategy


@dataclass
class PackedSteps:
    """All samples in packed sequences, and a model that trains on them; each call makes an update.

    loss_terms: that the loss is the mean of, label tokens or pairs.
    """

    strategy: Strategy
    batches: list[PackedBatch]
    totals: EpochTotals
    loss_terms: int
    first_loss: float | None = None

    def __call__(self) -> Measured:
        """Units: samples."""
        clock = Clock()
        loss = self.strategy.forward_backward(self.batches, self.loss_terms).item()
        self.strategy.step(1.0)
        self.first_loss = loss if self.first_loss is None else self.first_loss
        return clock.stop(self.totals.samples)
