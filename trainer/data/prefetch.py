"""Fetches remote shards ahead of the steps that need them, in the order of the packing plan."""

from __future__ import annotations

import threading

import numpy as np

from trainer.data.prefetch_schedule import ShardSchedule
from trainer.data.shards.disk_cache import NEVER, PrefetchResult, ShardCache
from trainer.errors import UserError

THREADS = 2  # each fetches one shard at a time
GROUPS_AHEAD = 2  # the one that is read, and the next
STEPS_BEHIND = 4  # other ranks may be so many steps behind: what those steps read is not evicted for later ones
LOOK_AGAIN_S = 1.0  # another process may have made room, or broken off


class ShardPrefetcher:
    """Threads that fill the cache with what comes next. They start with the first step and end with `close`."""

    def __init__(self, cache: ShardCache, schedule: ShardSchedule, *, group_shards: int) -> None:
        """`group_shards`: shards that are needed together, while a group of data shards is read."""
        self.cache, self._schedule = cache, schedule
        self.most_shards = min(len(schedule.shards), GROUPS_AHEAD * group_shards)  # kept or on their way
        self._changed = threading.Condition()
        self._step = 0
        self._threads: list[threading.Thread] = []
        self._unreadable: set[str] = set()
        self._error: BaseException | None = None
        self._closed = False
        cache.expect(self._next_uses)

    def advance(self, step: int) -> None:
        """Say that the rows of `step` are read now. Raises what ended a thread."""
        if self._error:
            raise self._error
        with self._changed:
            self._step = step
            self._changed.notify_all()
        if not self._threads:
            self._threads = [threading.Thread(target=self._run, name="shards", daemon=True) for _ in range(THREADS)]
            for thread in self._threads:
                thread.start()

    def close(self) -> None:
        """Stop the threads; each ends the fetch that it is at."""
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
        """Fetch the first shard that is not there; False when none is missing or none can be fetched."""
        next_uses, shards = self._schedule.next_uses(step), self._schedule.shards
        lately = self._schedule.next_uses(max(0, step - STEPS_BEHIND)) < step
        keep = {shards[number] for number in np.flatnonzero(lately)}
        for number in np.argsort(next_uses, kind="stable")[: self.most_shards].tolist():
            shard, needed_at = shards[number], int(next_uses[number])
            if needed_at == NEVER or self._closed:
                return False
            if shard in self._unreadable:
                continue
            try:
                came = self.cache.fetch_ahead(shard, needed_at, keep)
            except UserError:
                self._unreadable.add(shard)  # the step that reads it meets the error, if it is still there then
                continue
            if came in (PrefetchResult.FETCHED, PrefetchResult.NO_ROOM):
                return came is PrefetchResult.FETCHED
        return False
