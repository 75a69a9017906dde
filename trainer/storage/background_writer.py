"""Writes a small file of a run again and again in the background, so that training does not wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from vlmpipe.trainer.errors import UserError, print_warning
from vlmpipe.trainer.storage.base import Storage
from vlmpipe.trainer.storage.local import LocalStorage
from vlmpipe.trainer.storage.outage import Outage
from vlmpipe.trainer.threads import start_thread

LOCAL_INTERVAL_S = 0.5
REMOTE_INTERVAL_S = 15.0  # GCS takes about one write a second to one object
SETTLE_LIMIT_S = 20.0  # a store that does not answer may take minutes to fail


class BackgroundWriter:
    """Writes one object in a thread of its own, at most every few seconds and one write at a time.

    A write waits for the disk or the bucket for a tenth of a second and more, and all ranks would wait with rank 0.
    Each write is of the whole object, so the next one makes up for one that failed. `warn` is told of the first failure
    in a row.
    """

    def __init__(self, store: Storage, name: str, *, warn: Callable[[str], None] = print_warning) -> None:
        self._store, self._name, self._warn = store, name, warn
        self._interval_s = LOCAL_INTERVAL_S if isinstance(store, LocalStorage) else REMOTE_INTERVAL_S
        self._began_s = time.monotonic()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._outage = Outage()

    @property
    def is_due(self) -> bool:
        """Return whether the interval since the last write has passed."""
        return time.monotonic() - self._began_s >= self._interval_s

    @property
    def has_failed(self) -> bool:
        """Return whether the last write failed, as far as it has ended."""
        return self._error is not None

    def begin(self, content: bytes) -> bool:
        """Begin a write, unless one is running (False)."""
        if self._thread and self._thread.is_alive():
            return False
        self._report()
        self._began_s = time.monotonic()
        self._thread = start_thread(lambda: self._write(content), name=f"write {self._name}")
        return True

    def settle(self, content: bytes, *, limit_s: float = SETTLE_LIMIT_S) -> None:
        """Write now, after the previous write, and wait for the end of both for `limit_s` at most."""
        deadline_s = time.monotonic() + limit_s
        self._join(deadline_s)
        if self.begin(content):
            self._join(deadline_s)
        if self._thread and not self._thread.is_alive():
            self._report()

    def write(self, content: bytes) -> None:
        """Write now, after the previous write, whose error no longer matters. Raises its own."""
        if self._thread:
            self._thread.join()
        self._thread = None
        self._store.write(self._name, content)
        self._error = None
        self._report()
        self._began_s = time.monotonic()

    def _join(self, deadline_s: float) -> None:
        if self._thread:
            self._thread.join(max(0.0, deadline_s - time.monotonic()))

    def _write(self, content: bytes) -> None:
        try:
            self._store.write(self._name, content)
            self._error = None
        except Exception as error:  # reported by the next call: no one reads a thread's own traceback
            self._error = error

    def _report(self) -> None:
        """Warn of the last write that ended if it is the first in a row to fail; print when writes work again."""
        uri = self._store.uri(self._name)
        if error := self._error:
            if self._outage.failed():
                problem = error.found if isinstance(error, UserError) else repr(error)
                self._warn(f"{uri} is not written: {problem}. What it lacks is kept in memory and written later")
        elif lasted_s := self._outage.ended():
            print(f"{uri} is written again, after {lasted_s:,.0f} s", flush=True)
