"""The queue between the thread that makes micro-batches and training, bounded in bytes and in steps."""

from __future__ import annotations

import threading
from collections import deque
from typing import Generic, TypeVar

Item = TypeVar("Item")

STEPS_AHEAD = 2  # that have begun to be made: other ranks' shards must still be there (see `data.prefetch`)
AHEAD_BYTES = 1 << 30  # of micro-batches that wait for training, on each rank


class MicroBatchQueue(Generic[Item]):
    """Items of one producer for one consumer. What waits holds `max_bytes` at most, or is one item.

    So the host's memory does not grow with the number of micro-batches in a step. The producer holds one more item,
    which it has made and may not put yet, and the consumer the one that it took last.
    """

    def __init__(self, max_bytes: int = AHEAD_BYTES, max_steps: int = STEPS_AHEAD) -> None:
        self._max_bytes, self._max_steps = max_bytes, max_steps
        self._items: deque[tuple[Item, int, bool]] = deque()
        self._held_bytes = self._steps = 0
        self._changed = threading.Condition()
        self._closed = False

    def put(self, item: Item, *, held_bytes: int = 0, begins_step: bool = False) -> bool:
        """Wait for room. False, without putting it, once the queue is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._has_room(held_bytes, begins_step=begins_step))
            if self._closed:
                return False
            self._items.append((item, held_bytes, begins_step))
            self._held_bytes += held_bytes
            self._steps += begins_step
            self._changed.notify_all()
            return True

    def get(self) -> Item:
        """Wait for the next item."""
        with self._changed:
            self._changed.wait_for(lambda: self._items)
            item, held_bytes, begins_step = self._items.popleft()
            self._held_bytes -= held_bytes
            self._steps -= begins_step
            self._changed.notify_all()
            return item

    def close(self) -> None:
        """Let go what waits, and end the producer's wait."""
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()

    def _has_room(self, held_bytes: int, *, begins_step: bool) -> bool:
        if begins_step:
            return self._steps < self._max_steps
        return not self._held_bytes or self._held_bytes + held_bytes <= self._max_bytes
