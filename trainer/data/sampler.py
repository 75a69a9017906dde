"""The endless sequence of rows that a run reads, and how a position in it is one integer.

Rows of epoch 0, then of epoch 1, and so on, each epoch planned anew. A global batch is the next `global_batch_rows`
rows; the last one of an epoch may be short, so that epochs do not mix. `rows_consumed`, the number of rows before a
batch, is all the state there is: epoch and position follow from it, and the number of processes does not matter.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from trainer.config.job import SHUFFLE_SHARDS, DataConfig
from trainer.data.packing import Int64Array, RowPlan, plan_rows
from trainer.data.shards.index import SplitIndex
from trainer.errors import DataError

PLANS_KEPT = 2  # this epoch's and the one being prefetched


@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """The rows of one optimizer step: `start` to `stop` of the epoch's plan."""

    epoch: int
    start: int
    stop: int
    rows_consumed: int  # before this batch

    def __len__(self) -> int:
        return self.stop - self.start

    def rows_of(self, rank: int, world_size: int) -> list[int | None]:
        """Row numbers of one rank: equally many on every rank, None where the batch has no row left."""
        rows: list[int | None] = list(range(self.start + rank, self.stop, world_size))
        rows_per_rank = -(-len(self) // world_size)
        return rows + [None] * (rows_per_rank - len(rows))


class RowSequence:
    """Row plans of all epochs, made when needed. Safe to use from several threads."""

    def __init__(
        self,
        split: SplitIndex,
        *,
        row_tokens: int,
        row_images: int,
        seed: int,
        global_batch_rows: int,
        pack: bool = True,
        shuffle_shards: int = SHUFFLE_SHARDS,
        tile_tokens: int = 0,
    ) -> None:
        """`tile_tokens`: of each tile of images that are cut; `row_images` then counts tiles."""
        if not len(split):
            raise DataError(f"the {split.name} split has no samples", expected="at least one sample to make rows of")
        self._split, self._tiles = split, split.tiles(tile_tokens)
        self.row_tokens, self.row_images, self.pack, self.seed = row_tokens, row_images, pack, seed
        self.global_batch_rows, self.shuffle_shards = global_batch_rows, shuffle_shards
        self._plans: dict[int, RowPlan] = {}
        self._num_rows: list[int] = []
        self._lock = threading.RLock()  # num_rows holds it while it plans

    @classmethod
    def of(
        cls, split: SplitIndex, data: DataConfig, *, seed: int, global_batch_rows: int, tile_tokens: int
    ) -> RowSequence:
        """Of a run with this data section."""
        return cls(
            split,
            row_tokens=data.row_tokens,
            row_images=data.row_images,
            seed=seed,
            global_batch_rows=global_batch_rows,
            pack=data.pack,
            shuffle_shards=data.shuffle_shards,
            tile_tokens=tile_tokens,
        )

    def plan(self, epoch: int) -> RowPlan:
        """The rows of one epoch."""
        with self._lock:
            if epoch not in self._plans:
                self._plans[epoch] = plan_rows(
                    self._split.tokens,
                    self._tiles,
                    row_tokens=self.row_tokens,
                    row_images=self.row_images,
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

    def num_rows(self, epoch: int) -> int:
        """Rows in an epoch; epochs differ a little, as each packs another order."""
        with self._lock:
            while len(self._num_rows) <= epoch:
                self._num_rows.append(len(self.plan(len(self._num_rows))))
            return self._num_rows[epoch]

    def num_steps(self, epochs: int, *, at_most: int = 0) -> int:
        """Optimizer steps in the first `epochs` epochs; with `at_most`, epochs behind so many steps are not planned."""
        steps = 0
        for epoch in range(epochs):
            steps += self._steps_of(epoch)
            if 0 < at_most <= steps:
                return at_most
        return steps

    def batch_at(self, rows_consumed: int) -> GlobalBatch:
        """The global batch that follows `rows_consumed` rows."""
        epoch, start = 0, rows_consumed
        while start >= self.num_rows(epoch):
            start -= self.num_rows(epoch)
            epoch += 1
        stop = min(start + self.global_batch_rows, self.num_rows(epoch))
        return GlobalBatch(epoch, start, stop, rows_consumed)

    def batch(self, step: int) -> GlobalBatch:
        """The global batch of an optimizer step, counted from 0."""
        epoch = rows_before = 0
        while step >= self._steps_of(epoch):
            step -= self._steps_of(epoch)
            rows_before += self.num_rows(epoch)
            epoch += 1
        return self.batch_at(rows_before + step * self.global_batch_rows)

    def members(self, batch: GlobalBatch) -> Int64Array:
        """Sample numbers of a whole global batch."""
        plan = self.plan(batch.epoch)
        return plan.members[plan.offsets[batch.start] : plan.offsets[batch.stop]]

    def label_tokens(self, batch: GlobalBatch) -> int:
        """Label tokens of a whole global batch, over all ranks: what the summed loss is divided by."""
        return int(self._split.label_tokens[self.members(batch)].sum())

    def _steps_of(self, epoch: int) -> int:
        return -(-self.num_rows(epoch) // self.global_batch_rows)
