"""Writes a small file of a run again and again in the background, so that training does not wait."""

from __future__ import annotations

import threading
import time

from vlmpipe.trainer.storage.base import Storage
from vlmpipe.trainer.storage.local import LocalStorage
from vlmpipe.trainer.threads import start_thread

LOCAL_INTERVAL_S = 0.5
REMOTE_INTERVAL_S = 15.0  # GCS takes about one write a second to one object


class BackgroundWriter:
    """Writes one object in a thread of its own, at most every few seconds and one write at a time.

    A write waits for the disk or the bucket for a tenth of a second and more, and all ranks would wait with rank 0.
    """

    def __init__(self, store: Storage, name: str) -> None:
        self._store, self._name = store, name
        self._interval_s = LOCAL_INTERVAL_S if isinstance(store, LocalStorage) else REMOTE_INTERVAL_S
        self._began_s = time.monotonic()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    @property
    def is_due(self) -> bool:
        """Whether the interval since the last write has passed."""
        return time.monotonic() - self._began_s >= self._interval_s

    def begin(self, content: bytes) -> bool:
        """Begin a write, unless one is running (False). Raises the error of the previous write."""
        if self._thread and self._thread.is_alive():
            return False
        error, self._error = self._error, None
        if error:
            raise error
        self._began_s = time.monotonic()
        self._thread = start_thread(lambda: self._write(content), name=f"write {self._name}")
        return True

    def write(self, content: bytes) -> None:
        """Write now, after the previous write, whose error no longer matters."""
        if self._thread:
            self._thread.join()
        self._thread = self._error = None
        self._store.write(self._name, content)
        self._began_s = time.monotonic()

    def _write(self, content: bytes) -> None:
        try:
            self._store.write(self._name, content)
        except Exception as error:  # raised by the next `begin`
            self._error = error
