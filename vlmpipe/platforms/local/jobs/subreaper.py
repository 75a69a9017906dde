"""Runs a command in a subreaper: when it or its parent ends, no process of it is left.

    python vlmpipe/platforms/local/jobs/subreaper.py --parent-pid 4711 --grace-s 30 -- python -m vlmpipe.trainer.launch

A process group is not enough: torchrun gives every worker a session of its own, and a parent killed by SIGKILL cleans
up nothing. This process does what a container's init process does. On Linux it gets a signal when its parent dies
(PR_SET_PDEATHSIG) and inherits every orphan among its descendants (PR_SET_CHILD_SUBREAPER). Elsewhere it falls back to
the command's process group, and a parent's SIGKILL goes unnoticed.

TMPDIR is a folder of its own, which is removed at the end, also after a kill.

The first SIGTERM or SIGINT reaches the command as SIGTERM; a second one, or the end of the grace period, kills
everything. Exits with the command's code, or 128 + n when signal n ended it. Standard library only: it starts in 30 ms.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
CANNOT_START = 127  # as in a shell
DEFAULT_GRACE_S = 30.0


def run_in_subreaper(command: Iterable[str], *, grace_s: float = DEFAULT_GRACE_S) -> list[str]:
    """The command line that runs `command` in a subreaper, as a child of this process.

    Start it from the main thread: Linux sends the parent's death signal when the *thread* that started a child ends.
    """
    options = ["--parent-pid", str(os.getpid()), "--grace-s", f"{grace_s:g}"]
    return [sys.executable, "-S", "-E", str(Path(__file__).resolve()), *options, "--", *command]


def main(arguments: list[str]) -> int:
    """Run the command after `--` and return its exit code once no process of it is left."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parent-pid", type=int, required=True, help="process whose death ends the command")
    parser.add_argument("--grace-s", type=float, default=DEFAULT_GRACE_S, help="seconds from SIGTERM to SIGKILL")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    _tie_to_parent(options.parent_pid)
    stop = _Stop(options.grace_s)
    try:
        with tempfile.TemporaryDirectory(prefix="vlmpipe-", ignore_cleanup_errors=True) as scratch:
            process = subprocess.Popen(command, start_new_session=True, env={**os.environ, "TMPDIR": scratch})
            stop.attach(process.pid)
            code = _wait_for(process.pid)
            _sweep(process.pid)
            return code
    except OSError as error:
        print(f"error: cannot start {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        return CANNOT_START


def _tie_to_parent(parent_pid: int) -> None:
    if sys.platform == "linux":
        prctl = ctypes.CDLL(None, use_errno=True).prctl
        prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before the line above
        sys.exit(128 + signal.SIGTERM)


class _Stop:
    """Passes stop requests on to the command; one may arrive before the command is started."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s, self._pid, self._asked = grace_s, 0, False
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
            signal.signal(number, self._on_signal)

    def attach(self, pid: int) -> None:
        self._pid = pid
        if self._asked:
            self._ask()

    def _on_signal(self, number: int, _frame: object) -> None:
        if self._pid and (self._asked or number == signal.SIGALRM):
            _kill_children(self._pid)
        elif self._pid:
            self._ask()
        self._asked = True

    def _ask(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGTERM)
        signal.setitimer(signal.ITIMER_REAL, self._grace_s)


def _wait_for(pid: int) -> int:
    """Reap children, adopted ones too, until the command itself has ended."""
    while True:
        ended, status = os.waitpid(-1, 0)
        if ended == pid:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _sweep(pid: int) -> None:
    """Kill the processes that the command left. The children of each become ours, so repeat until there is none."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)
    while True:
        _kill_children(pid)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _kill_children(pid: int) -> None:
    """SIGKILL to every child of this process, and to the command's group for systems without adoption of orphans."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    for child in _children():
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def _children() -> list[int]:
    children = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_bytes().rpartition(b")")[2].split()  # the name before it may hold any bytes
            if int(fields[1]) == os.getpid():
                children.append(int(stat.parent.name))
    return children


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
