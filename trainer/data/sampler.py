"""Order of the packed sequences of a run; a position in it is one integer.

Rows of epoch 0, then of epoch 1, and so on, each epoch planned anew. A global batch is the next `global_batch_size`
rows; the last one of an epoch may be short, so that epochs do not mix. `sequences_consumed`, the number of rows
before a batch, is all the state there is: epoch and position follow from it, and the number of processes does not
matter.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from trainer.config.data import SHUFFLE_SHARDS, DataConfig
from trainer.data.packing import Int64Array, PackingPlan, plan_packing
from trainer.data.shards.index import SplitIndex
from trainer.errors import DataError

PLANS_KEPT = 2  # this epoch's and the one being prefetched


@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """The rows of one optimizer step: `start` to `stop` of the epoch's plan."""

    epoch: int
    start: int
    stop: int
    sequences_consumed: int  # before this batch

    def __len__(self) -> int:
        return self.stop - self.start

    def sequences_of(self, rank: int, world_size: int) -> list[int | None]:
        """Row numbers of one rank: equally many on every rank, None where the batch has no row left."""
        rows: list[int | None] = list(range(self.start + rank, self.stop, world_size))
        sequences_per_rank = -(-len(self) // world_size)
        return rows + [None] * (sequences_per_rank - len(rows))


class PackedBatchSampler:
    """Row plans of all epochs, made when needed. Safe to use from several threads."""

    def __init__(
        self,
        split: SplitIndex,
        *,
        sequence_length: int,
        max_images_per_sequence: int,
        seed: int,
        global_batch_size: int,
        pack: bool = True,
        shuffle_shards: int = SHUFFLE_SHARDS,
        tile_tokens: int = 0,
    ) -> None:
        """`tile_tokens`: of each tile of images that are cut; `max_images_per_sequence` then counts tiles."""
        if not len(split):
            raise DataError(f"the {split.name} split has no samples", expected="at least one sample to pack")
        self._split, self._tiles = split, split.tiles(tile_tokens)
        self.sequence_length, self.max_images_per_sequence, self.pack, self.seed = (
            sequence_length,
            max_images_per_sequence,
            pack,
            seed,
        )
        self.global_batch_size, self.shuffle_shards = global_batch_size, shuffle_shards
        self._plans: dict[int, PackingPlan] = {}
        self._num_sequences: list[int] = []
        self._lock = threading.RLock()  # num_sequences holds it while it plans

    @classmethod
    def of(
        cls, split: SplitIndex, data: DataConfig, *, seed: int, global_batch_size: int, tile_tokens: int
    ) -> PackedBatchSampler:
        """Of a run with this data section."""
        return cls(
            split,
            sequence_length=data.sequence_length,
            max_images_per_sequence=data.max_images_per_sequence,
            seed=seed,
            global_batch_size=global_batch_size,
            pack=data.pack,
            shuffle_shards=data.shuffle_shards,
            tile_tokens=tile_tokens,
        )

    def plan(self, epoch: int) -> PackingPlan:
        """The rows of one epoch."""
        with self._lock:
            if epoch not in self._plans:
                self._plans[epoch] = plan_packing(
                    self._split.tokens,
                    self._tiles,
                    sequence_length=self.sequence_length,
                    max_images_per_sequence=self.max_images_per_sequence,
                    seed=self.seed,
                    epoch=epoch,
                    pack=self.pack,
                    shards=self._split.shard_numbers,
                    shuffle_shards=self.shuffle_shards,
                )
                for old in sorted(self._plans)[:-PLANS_KEPT]:
                    if old != epoch:
                        del self._plans[old]
            return self._plans[epoch]

    def num_sequences(self, epoch: int) -> int:
        """Rows in an epoch; epochs differ a little, as each packs another order."""
        with self._lock:
            while len(self._num_sequences) <= epoch:
                self._num_sequences.append(len(self.plan(len(self._num_sequences))))
            return self._num_sequences[epoch]

    def num_steps(self, epochs: int, *, at_most: int = 0) -> int:
        """Optimizer steps in the first `epochs` epochs; with `at_most`, epochs behind so many steps are not planned."""
        steps = 0
        for epoch in range(epochs):
            steps += self._steps_of(epoch)
            if 0 < at_most <= steps:
                return at_most
        return steps

    def batch_at(self, sequences_consumed: int) -> GlobalBatch:
        """The global batch that follows `sequences_consumed` rows."""
        epoch, start = 0, sequences_consumed
        while start >= self.num_sequences(epoch):
            start -= self.num_sequences(epoch)
            epoch += 1
        stop = min(start + self.global_batch_size, self.num_sequences(epoch))
        return GlobalBatch(epoch, start, stop, sequences_consumed)

    def batch(self, step: int) -> GlobalBatch:
        """The global batch of an optimizer step, counted from 0."""
        epoch = sequences_before = 0
        while step >= self._steps_of(epoch):
            step -= self._steps_of(epoch)
            sequences_before += self.num_sequences(epoch)
            epoch += 1
        return self.batch_at(sequences_before + step * self.global_batch_size)

    def members(self, batch: GlobalBatch) -> Int64Array:
        """Sample numbers of a whole global batch."""
        plan = self.plan(batch.epoch)
        return plan.members[plan.offsets[batch.start] : plan.offsets[batch.stop]]

    def label_tokens(self, batch: GlobalBatch) -> int:
        """Label tokens of a whole global batch, over all ranks: what the summed loss is divided by."""
        return int(self._split.label_tokens[self.members(batch)].sum())

    def _steps_of(self, epoch: int) -> int:
        return -(-self.num_sequences(epoch) // self.global_batch_size)
