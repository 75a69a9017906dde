"""Progress of a step, for people, the live view and the run report.

Each step writes `steps/<step>.json` in the run's folder: state, start and end times, counts and a short message. It
also prints a line every few seconds.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator

from vlmpipe.trainer.errors import UNEXPECTED_PREFIX, ExitCode, UserError, print_warning
from vlmpipe.trainer.records.step import StepRecord, step_file
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.background_writer import BackgroundWriter
from vlmpipe.trainer.storage.outage import patiently, warned

PRINT_INTERVAL_S = 5.0


class Progress:
    """Writes one step's record, at most every few seconds. Only one process of a job should hold one.

    The first write and the last raise UserError when they fail; one in between is a warning, and the next makes up for
    it. With `patience_s`, the last one of a step that is done is repeated for so long while the store is away, and that
    of another is a warning.
    """

    def __init__(self, run_uri: str, step: str, *, quiet: bool = False, patience_s: float = 0.0) -> None:
        self.record = StepRecord(step)
        name, warn = step_file(step), functools.partial(print_warning, step=step)
        self._file = BackgroundWriter(open_storage(run_uri), name, warn=warn)
        self._quiet, self._patience_s = quiet, patience_s
        self._printed_s = time.monotonic()
        self._file.write(self.record.sealed())

    def update(self, done: float, total: float = 0, *, unit: str = "", message: str = "", **detail: object) -> None:
        """Report `done` of `total` `unit`s, with a short message."""
        record = self.record
        record.done, record.total = done, total or record.total
        record.unit, record.message = unit or record.unit, message or record.message
        record.detail.update(detail)
        if self._file.is_due:
            self._file.begin(self.record.sealed())
        if not self._quiet and time.monotonic() - self._printed_s >= PRINT_INTERVAL_S:
            self._printed_s = time.monotonic()
            share = f"{record.done:g}/{record.total:g}" if record.total else f"{record.done:g}"
            print(f"{record.step}: {share} {record.unit} {record.message}".rstrip(), flush=True)

    def flush(self) -> None:
        """Write the last report, before another object takes over this step's record."""
        self._file.settle(self.record.sealed())

    def finish(self, state: str = "done", message: str = "") -> None:
        """Close the record: `done`, `reused`, `stopped` or `failed`."""
        record = self.record
        record.state, record.ended_s = state, time.time()
        record.message = message or record.message
        write = functools.partial(self._file.write, self.record.sealed())
        if not self._patience_s:
            write()
        elif state in ("done", "reused"):
            patiently("writing the record of the step", write, limit_s=self._patience_s, step=record.step)
        else:  # a stop or an error is not held back
            with warned("writing the record of the step", step=record.step):
                write()
        if not self._quiet:
            took = record.ended_s - record.started_s
            print(f"{record.step}: {state} in {took:.1f} s. {record.message}".rstrip(), flush=True)


@contextlib.contextmanager
def step_progress(run_uri: str, step: str) -> Iterator[Progress]:
    """A Progress that ends with the block: done, stopped, or failed with the error's first line as its message.

    The record's detail gets the whole error and its exit code.
    """
    progress = Progress(run_uri, step)
    try:
        yield progress
    except UserError as error:
        progress.record.detail.update(exit_code=int(error.code), error=error.text())
        _finish_quietly(error.found, progress, "stopped" if error.code == ExitCode.PREEMPTED else "failed")
        raise
    except BaseException as error:
        problem = f"{UNEXPECTED_PREFIX}{type(error).__name__}: {error}"
        progress.record.detail.update(exit_code=int(ExitCode.UNEXPECTED), error=problem)
        _finish_quietly(problem, progress, "failed")
        raise
    if not progress.record.ended_s:
        progress.finish()


def _finish_quietly(problem: str, progress: Progress, state: str) -> None:
    # If the record cannot be written, on a full disk for example, the original error matters more.
    with contextlib.suppress(UserError):
        progress.finish(state, problem.splitlines()[0][:300])
