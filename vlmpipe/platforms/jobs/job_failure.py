"""A replica's failure: finds its error message in its output, and describes it with the exit code."""

from __future__ import annotations

import signal

from vlmpipe.trainer.errors import CAUSES, UNEXPECTED_PREFIX, ExitCode, UserError

PERMANENT = CAUSES - {ExitCode.STALLED}
"""Exit codes after which nothing is restarted: the next start would fail in the same way. A stall may pass."""
MEANINGS: dict[int, str] = {
    ExitCode.CONFIG: "configuration",
    ExitCode.DATA: "data",
    ExitCode.UNAVAILABLE: "something it needs is not reachable",
    ExitCode.NO_PROGRESS: "no progress from start to start",
    ExitCode.STALLED: "no step for much longer than steps take",
    ExitCode.SUPERSEDED: "a later start took over",
    ExitCode.CANNOT_WRITE: "cannot write its output",
    ExitCode.CHECKPOINT_CORRUPT: "checkpoint corrupt",
    ExitCode.NO_PERMISSION: "no permission",
    ExitCode.MACHINE: "the machine lacks what the job's spec buys",
    ExitCode.BAD_EXPORT: "the exported model does not open, or is not what was trained",
    ExitCode.WRONG_KERNEL: "a kernel computes wrong numbers on this machine",
    ExitCode.PREEMPTED: "preempted, resumable",
    128 + signal.SIGKILL: "killed, often for lack of memory",
    128 + signal.SIGTERM: "terminated",
}


def meaning(code: int) -> str:
    """ " (data)" for exit code 65; nothing for a code that has no meaning of its own."""
    return f" ({MEANINGS[code]})" if code in MEANINGS else ""


def rank_of_code(code: int) -> int:
    """Sort key of exit codes, the most informative first: a named cause, "resumable", a kill, any other, success."""
    if code in CAUSES:
        return 0
    if code == ExitCode.PREEMPTED:
        return 1
    return 4 if code == 0 else 2 if code > 128 else 3


def failure(code: int, replica: str, reason: str, *, log: str, restarts: int = 0) -> UserError:
    """The job's error. It begins with `reason`, the replica's own error message."""
    if code == ExitCode.PREEMPTED:
        return UserError("stopped on request, resumable", fix="run again to continue", code=code)
    again = f", after {restarts} restart{'s' if restarts > 1 else ''}" if restarts else ""
    if not reason:
        result = f"replica {replica} ended with exit code {code}{meaning(code)}{again}"
        return UserError(result, fix=f"read {log}", code=code)
    where = f"  where:    replica {replica}, exit code {code}{meaning(code)}{again}"
    return UserError(f"{reason}\n{where}", code=code)


class ErrorLines:
    """Finds the last error message in one stream of output, line by line."""

    def __init__(self) -> None:
        self._inside = False

    def read(self, text: str, last: str) -> str:
        """The last error up to this line, given without its end; `last` is the error before it.

        An error is its sentence, then what was expected and what to do.
        """
        if text.startswith("error: "):
            self._inside = True
            return text.removeprefix("error: ")
        if self._inside and text.startswith("  "):
            return f"{last}\n{text}"
        self._inside = False
        return last or text if text.startswith(UNEXPECTED_PREFIX) else last
