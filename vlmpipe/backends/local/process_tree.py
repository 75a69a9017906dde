"""Finds and signals the processes of a replica."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterable

import psutil


def descendants(pid: int) -> list[psutil.Process]:
    """Children of a process, their children and so on; each comes after its parent."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive=True)
    return []


def worker_of_rank(pid: int, rank: int) -> psutil.Process | None:
    """The training process of this rank below `pid`, as torchrun started it; None when it is not there.

    LOCAL_RANK tells torchrun's workers from the launcher, in which RANK counts nodes. What a worker starts itself
    inherits both, and comes after it.
    """
    for candidate in descendants(pid):
        with contextlib.suppress(psutil.Error):
            variables = candidate.environ()
            if variables.get("RANK") == str(rank) and "LOCAL_RANK" in variables:
                return candidate
    return None


def send(number: signal.Signals, processes: Iterable[psutil.Process]) -> int:
    """Send a signal to each; how many were still there."""
    reached = 0
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)
            reached += 1
    return reached
