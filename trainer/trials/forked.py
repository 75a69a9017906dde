"""Work in child processes of one that has imported torch: each starts at once and in a fresh state."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from vlmpipe.trainer.distributed.process import run_worker
from vlmpipe.trainer.errors import UNEXPECTED_PREFIX, ExitCode, UserError

LONGEST_ERROR = 2000


@dataclass(frozen=True)
class Ended:
    """Exit code of a child, 128 + n for signal n, and its error in a sentence."""

    code: int
    error: str = ""


class ForkedChildren:
    """Runs one child at a time, and passes SIGTERM and SIGINT on to it.

    The process must have used no device and no thread: a child inherits neither.
    """

    def __init__(self) -> None:
        self.stopped = False
        self._pid = 0
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)

    def run(self, work: Callable[[], int | None]) -> Ended:
        """Run `work` as a worker of its own to its end (see `vlmpipe.trainer.distributed.process.run_worker`)."""
        sys.stdout.flush()
        sys.stderr.flush()
        with tempfile.NamedTemporaryFile(prefix="vlmpipe-error-") as left:
            self._pid = os.fork()
            if not self._pid:
                for number in (signal.SIGTERM, signal.SIGINT):
                    signal.signal(number, signal.SIG_DFL)
                run_worker(_leaving_error(work, Path(left.name)))
            if self.stopped:  # asked before the child's number was known
                os.kill(self._pid, signal.SIGTERM)
            _, status = os.waitpid(self._pid, 0)
            self._pid = 0
            code, error = os.waitstatus_to_exitcode(status), left.read(LONGEST_ERROR).decode(errors="replace")
        if code < 0:
            return Ended(128 - code, error or f"ended by {signal.Signals(-code).name}")
        return Ended(code, error or (f"ended with exit code {code}" if code else ""))

    def _stop(self, _number: int, _frame: object) -> None:
        self.stopped = True
        if self._pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGTERM)


def _leaving_error(work: Callable[[], int | None], file: Path) -> Callable[[], int | None]:
    def guarded() -> int | None:
        try:
            return work()
        except UserError as error:
            if error.code != ExitCode.PREEMPTED:
                file.write_text(error.found, encoding="utf-8")
            raise
        except Exception as error:
            file.write_text(f"{UNEXPECTED_PREFIX}{type(error).__name__}: {error}", encoding="utf-8")
            raise

    return guarded
