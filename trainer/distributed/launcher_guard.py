"""Wakes a launcher that has been stopped (SIGSTOP) for too long.

Its ranks may be done and gone: no heartbeat is missed, no watchdog runs, and the job would go on until its timeout. The
guard is a process of its own, in a session of its own, and runs this file with the standard library alone. Of a frozen
container it is a part: see vlmpipe/platforms/jobs/finished_program.py.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

STOPPED_S = 540.0  # before a local job's supervisor ends the job
LOOK_S, END_S = 15.0, 10.0
PROCESSES = Path("/proc")
STOPPED = "T"  # proc_pid_stat(5), field 3


@contextlib.contextmanager
def guarded(*, stopped_s: float = STOPPED_S, look_s: float = LOOK_S) -> Iterator[None]:
    """Guard this process while the block runs, where the system shows the states of processes (Linux)."""
    if not (PROCESSES / "self/stat").exists():
        yield
        return
    command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(stopped_s), str(look_s)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True) as process:
        try:
            yield
        finally:
            assert process.stdin
            process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
            process.kill()  # one that was stopped too


def guard(pid: int, stopped_s: float, look_s: float) -> None:
    """Look at the process until standard input ends, as it does with the process."""
    quiet_s = 0.0
    while not select.select([sys.stdin], [], [], look_s)[0]:
        # Of a machine that was frozen as a whole, one look counts.
        quiet_s = quiet_s + look_s if is_stopped(pid) else 0.0
        if quiet_s >= stopped_s:
            print(f"warning: the launcher was stopped (SIGSTOP) for {quiet_s:g} s: it is continued", file=sys.stderr)
            os.kill(pid, signal.SIGCONT)
            quiet_s = 0.0


def is_stopped(pid: int) -> bool:
    """Return whether the process was stopped by a signal; False where it has ended."""
    try:
        return (PROCESSES / str(pid) / "stat").read_text(encoding="utf-8", errors="replace").rpartition(") ")[2][
            0
        ] == STOPPED
    except (OSError, IndexError):
        return False


if __name__ == "__main__":
    guard(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]))
