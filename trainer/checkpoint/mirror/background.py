"""Mirrors checkpoints during training, in a thread of rank 0 that uses none of training's collectives.

A newer checkpoint overtakes those that wait. Errors do not stop training: the thread tries again, and the lag shows it.
A copy that the end of the process cuts off is continued by `sync_checkpoint`, or by the next start.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from vlmpipe.trainer.checkpoint.attempts import step_of
from vlmpipe.trainer.checkpoint.commit import Checkpoint, read_commit, was_uncommitted
from vlmpipe.trainer.checkpoint.manifest import DamagedError
from vlmpipe.trainer.checkpoint.mirror.copies import mirror_checkpoint
from vlmpipe.trainer.checkpoint.retention import Retention, delete_old_copies
from vlmpipe.trainer.errors import UserError
from vlmpipe.trainer.storage.base import Storage
from vlmpipe.trainer.threads import start_thread

RETRY_S = 60.0  # after an error, unless a newer checkpoint comes first
LAG_WARNING_S = 1800.0


@dataclass(frozen=True)
class MirrorLag:
    """Work that the loss of the first store would cost."""

    steps: int  # from the newest copied checkpoint to the step asked about
    seconds: float  # age of the oldest checkpoint that is newer than that copy; 0.0 when there is none
    error: str = ""  # why the last try failed, "" when it did not

    @property
    def is_long(self) -> bool:
        """Return whether the lag is worth a warning."""
        return self.seconds > LAG_WARNING_S

    def warning(self) -> str:
        """Return the sentence for a lag that is too long."""
        why = f", for the last copy failed: {self.error}" if self.error else ""
        return (
            f"the mirror lags: it has nothing of the last {self.steps} steps, and a checkpoint has waited "
            f"{self.seconds:,.0f} s to be copied{why}"
        )


class BackgroundMirror:
    """Copies each checkpoint that training commits; only the newest of those that wait.

    `copied_step` is the step of the mirror's newest checkpoint at the start, 0 without one. `clock` gives seconds.
    """

    def __init__(
        self,
        source: Storage,
        mirror: Storage,
        retention: Retention,
        *,
        copied_step: int,
        key: bytes = b"",
        retry_s: float = RETRY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source, self._mirror, self._retention, self._key = source, mirror, retention, key
        self._copied_step, self._retry_s, self._clock = copied_step, retry_s, clock
        self._committed: dict[str, float] = {}  # not yet copied: name -> when
        self._error = ""
        self._lock = threading.Lock()  # of the four above
        self._queue: queue.SimpleQueue[str] = queue.SimpleQueue()
        start_thread(self._run, name="mirror")

    def submit(self, name: str) -> None:
        """Copy this checkpoint, which was just committed."""
        with self._lock:
            self._committed[name] = self._clock()
        self._queue.put(name)

    def lag(self, step: int) -> MirrorLag:
        """The lag once `step` steps are done."""
        with self._lock:
            oldest = min(self._committed.values(), default=None)
            seconds = 0.0 if oldest is None else self._clock() - oldest
            return MirrorLag(step - self._copied_step, seconds, self._error)

    def _run(self) -> None:
        name = self._queue.get()
        while True:
            while not self._queue.empty():
                name = self._queue.get()
            try:
                error = self._copy(name)
            except UserError as failed:
                error = failed.found
            except Exception as failed:  # a thread that ends without a word would leave no second copy
                error = repr(failed)
            with self._lock:
                self._error = error
                if not error:
                    self._copied_step = step_of(name)
                    # All older ones were overtaken.
                    until = self._committed[name]
                    self._committed = {name: when for name, when in self._committed.items() if when > until}
            try:
                name = self._queue.get(timeout=self._retry_s if error else None)
            except queue.Empty:
                continue

    def _copy(self, name: str) -> str:
        """Why the checkpoint could not be copied, "" when it was."""
        try:
            checkpoint = Checkpoint(name, read_commit(self._source, name, key=self._key))
            mirror_checkpoint(self._source, self._mirror, checkpoint)
        except (DamagedError, UserError) as error:
            if was_uncommitted(self._source, name):
                return f"checkpoint {name} was deleted while it was copied; keep more (train.keep_checkpoints)"
            return error.found if isinstance(error, UserError) else str(error)
        delete_old_copies(self._mirror, self._retention, newest=name, key=self._key)
        return ""
