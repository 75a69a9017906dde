"""Which step needs which shard, for prefetching and eviction."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np

from trainer.data.packing import Int64Array
from trainer.data.sampler import PackedBatchSampler
from trainer.data.shards.disk_cache import NEVER

EPOCHS_KEPT = 2  # this one and the next


@dataclass(frozen=True)
class Needs:
    """Sample n needs the shards `numbers[offsets[n]:offsets[n + 1]]`."""

    offsets: Int64Array  # (samples + 1,)
    numbers: Int64Array  # (needs,)

    @classmethod
    def one_each(cls, numbers: Int64Array) -> Needs:
        """Every sample lies in one shard: `numbers` (samples,)."""
        return cls(np.arange(len(numbers) + 1), numbers)

    def of(self, samples: Int64Array) -> tuple[Int64Array, Int64Array]:
        """(needs of these samples,) shard numbers, and (samples,) how many each of them has."""
        starts, counts = self.offsets[samples], self.offsets[samples + 1] - self.offsets[samples]
        ends = np.cumsum(counts)
        within = np.arange(int(counts.sum())) - np.repeat(ends - counts, counts)
        return self.numbers[np.repeat(starts, counts) + within], counts


class ShardSchedule:
    """The shards of every step up to `end_step`: those of its global batch, so that all processes go by the same.

    A machine that runs a share of the ranks fetches a little more than it must: of a shard's many samples, each machine
    nearly always gets some. Safe to use from several threads.
    """

    def __init__(self, shards: list[str], needs: Needs, sequence: PackedBatchSampler, end_step: int) -> None:
        self.shards, self._needs = shards, needs
        self._sequence, self._end_step = sequence, end_step
        self._epochs: dict[int, Int64Array] = {}
        self._lock = threading.Lock()

    def next_uses(self, step: int) -> Int64Array:
        """(shards,) first step from `step` on, in its epoch or the next, that needs each shard, else NEVER."""
        epoch = self._sequence.batch(step).epoch
        found = self._uses_from(epoch, step)
        if (found == NEVER).any() and self._sequence.num_steps(epoch + 1) < self._end_step:
            found = np.minimum(found, self._uses_from(epoch + 1, step))
        found[found >= self._end_step] = NEVER
        return found

    def _uses_from(self, epoch: int, step: int) -> Int64Array:
        """(shards,) as `next_uses`, of one epoch."""
        with self._lock:
            if epoch not in self._epochs:
                for old in sorted(self._epochs)[: 1 - EPOCHS_KEPT]:
                    del self._epochs[old]
                self._epochs[epoch] = self._uses_of(epoch)
            uses = self._epochs[epoch]
        first = self._sequence.num_steps(epoch)
        num_steps, shards = self._sequence.num_steps(epoch + 1) - first, np.arange(len(self.shards))
        place = np.searchsorted(uses, shards * num_steps + max(0, step - first))
        candidates = np.append(uses, len(self.shards) * num_steps)[place]
        return np.where(candidates // num_steps == shards, first + candidates % num_steps, NEVER)

    def _uses_of(self, epoch: int) -> Int64Array:
        """Each (shard, step of the epoch) that belong together, as shard * steps of the epoch + step, sorted."""
        plan, sequences_per_step = self._sequence.plan(epoch), self._sequence.global_batch_size
        num_steps = self._sequence.num_steps(epoch + 1) - self._sequence.num_steps(epoch)
        steps = np.repeat(np.arange(len(plan)) // sequences_per_step, np.diff(plan.offsets))
        numbers, counts = self._needs.of(plan.members)
        uses: Int64Array = np.unique(numbers * num_steps + np.repeat(steps, counts))
        return uses
