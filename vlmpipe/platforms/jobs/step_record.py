"""Record of a job's step (`steps/<step>.json`), kept by the process that runs the job.

The job's own program writes the same file meanwhile.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from vlmpipe.trainer.errors import ExitCode, UserError
from vlmpipe.trainer.records.step import StepRecord, read_step
from vlmpipe.trainer.storage.base import Storage


class JobRecord:
    """The record of one job. What the job's own program writes stays; `detail` is added to it at the end."""

    def __init__(self, store: Storage, step: str) -> None:
        self.detail: dict[str, object] = {}
        self.started_s: float | None = None  # None for a job that another process started
        self._store, self._step = store, step

    def open(self) -> None:
        """Begin the record of a job that is about to start."""
        self.started_s = time.time()
        StepRecord(self._step, started_s=self.started_s).write(self._store)

    def close(self, state: str, message: str = "") -> None:
        record = read_step(self._store, self._step) or StepRecord(self._step)
        record.started_s = record.started_s if self.started_s is None else self.started_s
        if record.state == "running" or (state != "done" and record.state != state):
            record.state, record.message = state, message or record.message
        record.ended_s = time.time()
        record.detail.update(self.detail)
        record.write(self._store)


@contextlib.contextmanager
def recorded_job(store: Storage, step: str) -> Iterator[JobRecord]:
    """The record of the job that the block opens and runs. It is closed with the block's error or exit code 0."""
    record = JobRecord(store, step)
    try:
        yield record
    except UserError as error:
        state = "stopped" if error.code == ExitCode.PREEMPTED else "failed"
        record.detail.update(exit_code=int(error.code), error=error.text())
        # Where the record cannot be written, on a full disk for example, the error itself is what matters.
        with contextlib.suppress(UserError):
            record.close(state, error.found.splitlines()[0])
        raise
    if record.started_s is not None:
        record.detail["exit_code"] = 0
        record.close("done")
