"""The processes that a program has started, whatever sessions they are in, and which of them must hear of a stop."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_SIGTERM_BIT = 1 << (signal.SIGTERM - 1)


@dataclass(frozen=True)
class Running:
    """A process that runs."""

    pid: int
    parent: int
    handles_stop: bool  # it catches SIGTERM, or waits for it: what it has started is its own affair then


def adopt_orphans() -> None:
    """Become the parent of every process whose parent ends below this one, so that all are found. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def below(root: int, *, without: Collection[int] = ()) -> list[Running]:
    """Children of a process, their children and so on; each comes after its parent.

    Args:
        without: processes that do not count, and neither do those below them.
    """
    everything, processes, parents = _everything(), list[Running](), [root]
    while parents:
        children = [process for process in everything if process.parent in parents and process.pid not in without]
        processes += children
        parents = [child.pid for child in children]
    return processes


def to_ask(parent: int, processes: Iterable[Running]) -> list[int]:
    """Return the processes to send SIGTERM to, so that each process below `parent` hears of the stop once.

    One that handles the signal passes it on as it likes: torchrun does, and a second one would end workers that save.
    Below one that it ends, such as a command that starts torchrun and waits, no process would hear of it.
    """
    asked, silent = [], {parent}
    for process in processes:  # parents first
        if process.parent in silent:
            asked.append(process.pid)
            if not process.handles_stop:
                silent.add(process.pid)
    return asked


def _everything() -> list[Running]:
    """All processes of the machine but those that have ended and were not waited for."""
    processes = []
    for path in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError, KeyError, ValueError):
            text = path.read_text(encoding="utf-8", errors="replace")  # a process may have any bytes for its name
            fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
            if fields["State"].split()[0] not in "ZX":
                handled = int(fields["SigCgt"], 16) | int(fields["SigBlk"], 16)
                processes.append(Running(int(path.parent.name), int(fields["PPid"]), bool(handled & _SIGTERM_BIT)))
    return processes


def kill_all(processes: Iterable[Running]) -> None:
    """SIGKILL to each that is still there."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
