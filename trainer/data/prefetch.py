"""Fetches remote shards ahead of the steps that need them, in the order of the packing plan."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np

from vlmpipe.trainer.data.packing import Int64Array, Integers
from vlmpipe.trainer.data.sampler import PackedBatchSampler
from vlmpipe.trainer.data.shards.disk_cache import NEVER, PrefetchResult, ShardCache
from vlmpipe.trainer.errors import UserError
from vlmpipe.trainer.threads import start_thread

EPOCHS_KEPT = 2  # this one and the next
THREADS = 2  # each fetches one shard at a time
GROUPS_AHEAD = 2  # the one being read, and the next
STEPS_BEHIND = 4  # other ranks may be this many steps behind: shards of those steps are not evicted for later ones
LOOK_AGAIN_S = 1.0  # another process may have made room, or stopped fetching


@dataclass(frozen=True)
class Needs:
    """Sample n needs the shards `numbers[offsets[n]:offsets[n + 1]]`."""

    offsets: Int64Array  # (samples + 1,)
    numbers: Integers  # (needs,)

    @classmethod
    def one_each(cls, numbers: Integers) -> Needs:
        """Return the needs of samples that lie in one shard each. numbers: (samples,) shard of each sample."""
        return cls(np.arange(len(numbers) + 1), numbers)

    def of(self, samples: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Shard numbers (needs of these samples,) and how many each sample has (samples,)."""
        starts, counts = self.offsets[samples], self.offsets[samples + 1] - self.offsets[samples]
        ends = np.cumsum(counts)
        within = np.arange(int(counts.sum())) - np.repeat(ends - counts, counts)
        return self.numbers[np.repeat(starts, counts) + within], counts


class ShardSchedule:
    """The shards of every step up to `end_step`. Safe to use from several threads.

    All processes use the shards of the global batch. A machine that runs some of the ranks fetches a little more than
    it needs: nearly every machine gets some of a shard's many samples.
    """

    def __init__(self, shards: list[str], needs: Needs, sequence: PackedBatchSampler, end_step: int) -> None:
        self.shards, self._needs = shards, needs
        self._sequence, self._end_step = sequence, end_step
        self._epochs: dict[int, Int64Array] = {}
        self._lock = threading.Lock()

    def next_uses(self, step: int) -> Int64Array:
        """(shards,) first step from `step` on, in its epoch or the next, that needs each shard, else NEVER."""
        epoch = self._sequence.batch(step).epoch
        uses = self._uses_from(epoch, step)
        if (uses == NEVER).any() and self._sequence.num_steps(epoch + 1) < self._end_step:
            uses = np.minimum(uses, self._uses_from(epoch + 1, step))
        uses[uses >= self._end_step] = NEVER
        return uses

    def _uses_from(self, epoch: int, step: int) -> Int64Array:
        """(shards,) as `next_uses`, within one epoch."""
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
        """Every pair of a shard and a step that needs it, as shard * steps of the epoch + step, sorted."""
        plan, sequences_per_step = self._sequence.plan(epoch), self._sequence.global_batch_size
        num_steps = self._sequence.num_steps(epoch + 1) - self._sequence.num_steps(epoch)
        steps = np.repeat(np.arange(len(plan)) // sequences_per_step, np.diff(plan.offsets))
        numbers, counts = self._needs.of(plan.members)
        # In 64 bits: the index has numbers of shards in 32.
        uses: Int64Array = np.unique(numbers.astype(np.int64) * num_steps + np.repeat(steps, counts))
        return uses


class ShardPrefetcher:
    """Threads that fill the cache with the shards needed next, from the first step until `close`."""

    def __init__(self, cache: ShardCache, schedule: ShardSchedule, *, group_shards: int) -> None:
        """`group_shards`: shards in use while a group of data shards is read."""
        self.cache, self._schedule = cache, schedule
        self.max_shards = min(len(schedule.shards), GROUPS_AHEAD * group_shards)  # cached or being fetched
        self._changed = threading.Condition()
        self._step = 0
        self._threads: list[threading.Thread] = []
        self._unreadable: set[str] = set()
        self._error: BaseException | None = None
        self._closed = False
        cache.expect(self._next_uses)

    def advance(self, step: int) -> None:
        """Report that `step` is read now. Raises the error that ended a thread."""
        if self._error:
            raise self._error
        with self._changed:
            self._step = step
            self._changed.notify_all()
        if not self._threads:
            self._threads = [start_thread(self._run, name="shards") for _ in range(THREADS)]

    def close(self) -> None:
        """Stop the threads; each completes its current fetch."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _next_uses(self) -> dict[str, int]:
        next_uses = self._schedule.next_uses(self._step)
        return dict(zip(self._schedule.shards, next_uses.tolist(), strict=True))

    def _run(self) -> None:
        try:
            while not self._closed:
                step = self._step
                if self._fetch_one(step):
                    continue
                with self._changed:
                    if step == self._step and not self._closed:
                        self._changed.wait(LOOK_AGAIN_S)
        except BaseException as error:  # handed to `advance`, which raises it
            self._error = error

    def _fetch_one(self, step: int) -> bool:
        """Fetch the first missing shard. False when none is missing or none can be fetched."""
        next_uses, shards = self._schedule.next_uses(step), self._schedule.shards
        recent = self._schedule.next_uses(max(0, step - STEPS_BEHIND)) < step
        keep = {shards[number] for number in np.flatnonzero(recent)}
        for number in np.argsort(next_uses, kind="stable")[: self.max_shards].tolist():
            shard, needed_at = shards[number], int(next_uses[number])
            if needed_at == NEVER or self._closed:
                return False
            if shard in self._unreadable:
                continue
            try:
                result = self.cache.fetch_ahead(shard, needed_at, keep)
            except UserError as error:
                if error.passes:  # look again later
                    return False
                self._unreadable.add(shard)  # the step that reads it raises the error, if it persists
                continue
            if result in (PrefetchResult.FETCHED, PrefetchResult.NO_ROOM):
                return result is PrefetchResult.FETCHED
        return False
