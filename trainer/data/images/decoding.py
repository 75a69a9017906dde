"""A bound on the memory of decoded images, whatever the number of threads: 150 KB of PNG may hold 49 megapixels."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

MAX_BYTES = 1 << 30  # of decoded images at once in a process; a larger image is decoded alone
BYTES_A_PIXEL = 16  # four channels, and as much again three times for conversions


class Budget:
    """Bytes that threads hold together; who asks for too many waits."""

    def __init__(self, max_bytes: int) -> None:
        self._most, self._held, self._changed = max_bytes, 0, threading.Condition()

    @contextmanager
    def holding(self, size_bytes: int) -> Iterator[None]:
        """Hold `size_bytes` inside the block, at most all, once other threads have returned theirs."""
        taken = min(size_bytes, self._most)
        with self._changed:
            self._changed.wait_for(lambda: self._held + taken <= self._most)
            self._held += taken
        try:
            yield
        finally:
            with self._changed:
                self._held -= taken
                self._changed.notify_all()


DECODING = Budget(MAX_BYTES)
