"""Writes small files of a run in the background, so that training does not wait."""

from __future__ import annotations

import threading

from trainer.storage.base import Storage


class BackgroundWriter:
    """One object that is written again and again: in a thread of its own, one write at a time.

    A write takes a flush of the disk or a request to a bucket, a tenth of a second and more, for which all ranks would
    wait when rank 0 says how far it is.
    """

    def __init__(self, store: Storage, name: str) -> None:
        self._store, self._name = store, name
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def begin(self, content: bytes) -> bool:
        """Begin to write; False, and nothing is done, while the write before is under way.

        Raises what the write before raised.
        """
        if self._thread and self._thread.is_alive():
            return False
        error, self._error = self._error, None
        if error:
            raise error
        self._thread = threading.Thread(target=self._write, args=(content,), name=f"write {self._name}", daemon=True)
        self._thread.start()
        return True

    def write(self, content: bytes) -> None:
        """Write, after the write before, whose error does not matter any more; it is stored when this returns."""
        if self._thread:
            self._thread.join()
        self._thread = self._error = None
        self._store.write(self._name, content)

    def _write(self, content: bytes) -> None:
        try:
            self._store.write(self._name, content)
        except Exception as error:  # of whatever kind: it is raised where the object is written next
            self._error = error
