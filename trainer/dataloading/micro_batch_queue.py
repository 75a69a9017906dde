"""The queue between the threads that make micro-batches and training: in order, bounded in bytes and in steps."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

Item = TypeVar("Item")

STEPS_AHEAD = 2  # that have begun to be made: other ranks' shards must still be there (see `data.prefetch`)
AHEAD_BYTES = 1 << 30  # of micro-batches that wait for training, on each rank
FIRST = 3  # begun before the size of one is known; `vlmpipe.planner.memory.host` counts with as many


@dataclass
class Place(Generic[Item]):
    """A place in the queue. Its item is there, or is being made."""

    images: int = 0  # of the item that is being made
    item: Item | None = None
    held_bytes: int = 0
    is_filled: bool = False
    begins_step: bool = False


class MicroBatchQueue(Generic[Item]):
    """Items for one consumer, in the order of their places, whichever is made first. What waits, and what is being made
    as far as that is known from the items before, holds `max_bytes` at most, or is one item.

    So the host's memory does not grow with the number of micro-batches in a step. The consumer holds the item that it
    took last.
    """

    def __init__(self, max_bytes: int = AHEAD_BYTES, max_steps: int = STEPS_AHEAD) -> None:
        self._max_bytes, self._max_steps = max_bytes, max_steps
        self._places: deque[Place[Item]] = deque()
        self._held_bytes = self._steps = self._making = self._making_images = 0
        self._largest_bytes: int | None = None  # of the items so far
        self._changed = threading.Condition()
        self._closed = False

    def put(self, item: Item, *, begins_step: bool = False) -> bool:
        """Add an item of no size; of one that begins a step, wait for room. False once the queue is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not begins_step or self._steps < self._max_steps)
            if self._closed:
                return False
            self._places.append(Place(item=item, is_filled=True, begins_step=begins_step))
            self._steps += begins_step
            self._changed.notify_all()
            return True

    def reserve(self, images: int, max_images: int) -> Place[Item] | None:
        """Wait for room for an item that is to be made, and take the next place. None once the queue is closed.

        Items are begun while fewer than `max_images` images are being made, so that each thread has one.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._has_room(max_images))
            if self._closed:
                return None
            place = Place[Item](images=images)
            self._places.append(place)
            self._making += 1
            self._making_images += images
            return place

    def fill(self, place: Place[Item], item: Item, *, held_bytes: int = 0) -> None:
        """Put the item into its place, unless there is one."""
        with self._changed:
            if place.is_filled:
                return
            place.item, place.held_bytes, place.is_filled = item, held_bytes, True
            self._making -= 1
            self._making_images -= place.images
            self._held_bytes += held_bytes
            self._largest_bytes = max(self._largest_bytes or 0, held_bytes)
            if self._closed:
                place.item = None
            self._changed.notify_all()

    def get(self) -> Item:
        """Wait for the next item."""
        with self._changed:
            self._changed.wait_for(lambda: self._places and self._places[0].is_filled)
            place = self._places.popleft()
            self._held_bytes -= place.held_bytes
            self._steps -= place.begins_step
            self._changed.notify_all()
            return cast(Item, place.item)

    def close(self) -> None:
        """Let go what waits, and end the producer's wait."""
        with self._changed:
            self._closed = True
            self._places.clear()
            self._changed.notify_all()

    def _has_room(self, max_images: int) -> bool:
        if self._making_images >= max_images:
            return False
        if self._largest_bytes is None:
            return self._making < FIRST
        ahead = self._held_bytes + (self._making + 1) * self._largest_bytes
        return not (self._held_bytes or self._making) or ahead <= self._max_bytes
