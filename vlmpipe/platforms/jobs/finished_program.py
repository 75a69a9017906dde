"""Notices a job that does not end although its program has: its launcher is stopped, or its container is frozen.

The program's end is in the step's record. Nothing inside of a frozen container can tell, and its service sees a job
that runs, until the job's timeout of days.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from vlmpipe.trainer.errors import UserError
from vlmpipe.trainer.records.step import read_step
from vlmpipe.trainer.storage.base import Storage

FINISHED = ("done", "reused")
LINGERS_S = 600.0  # that a launcher may take to end; as long as ranks wait for each other
LOOK_S = 60.0  # how often the record is read


class FinishedProgram:
    """Looks at one job's record while a step waits for the job."""

    def __init__(self, store: Storage, step: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._store, self._step, self._clock = store, step, clock
        self._looked_s = clock()
        self._since_s: float | None = None  # by this machine's clock: the record is by another's
        self._ended_s = 0.0  # by the record, which a restarted program opens again

    def lingers(self, created_s: float = 0.0) -> bool:
        """Return whether the program has recorded a good end, and the job has gone on for `LINGERS_S` since.

        created_s: Unix seconds of the job's creation. An end before it is that of an earlier job: the record of a run
        that is continued stays until the new program opens it, which machines may be waited for.
        """
        now_s = self._clock()
        if now_s - self._looked_s >= LOOK_S:
            self._looked_s = now_s
            ended_s = self._recorded_end()
            ended_s = ended_s if ended_s >= created_s else 0.0
            if ended_s != self._ended_s or not ended_s:
                self._ended_s, self._since_s = ended_s, now_s if ended_s else None
        return self._since_s is not None and now_s - self._since_s >= LINGERS_S

    def sentence(self) -> str:
        return (
            f"{self._step} has recorded its end, and its job has not ended for {LINGERS_S:g} s: its launcher is "
            "stopped or frozen"
        )

    def _recorded_end(self) -> float:
        """Unix seconds; 0 while it runs, and where the store does not answer."""
        try:
            record = read_step(self._store, self._step)
        except UserError:
            return self._ended_s
        return record.ended_s if record and record.state in FINISHED else 0.0
