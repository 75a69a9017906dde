"""The processes below a replica's container, found in /proc. On systems without it nothing is found."""

from __future__ import annotations

import contextlib
import os
import signal
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path


def descendants(pid: int) -> list[int]:
    """Children of a process, their children and so on, nearest first."""
    children = defaultdict(list)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended since it was listed
            fields = stat.read_text().rpartition(")")[2].split()  # the name before it may hold anything
            children[int(fields[1])].append(int(stat.parent.name))
    found, level = list[int](), [pid]
    while level:
        level = [child for parent in level for child in children[parent]]
        found += level
    return found


def worker_of_rank(pid: int, rank: int) -> int | None:
    """The training process of this rank below `pid`, as torchrun started it; None when it is not there.

    LOCAL_RANK tells torchrun's workers from the launcher, in which RANK counts nodes. What a worker starts itself
    inherits both, and comes after it.
    """
    for candidate in descendants(pid):
        with contextlib.suppress(OSError):
            variables = Path(f"/proc/{candidate}/environ").read_bytes().split(b"\0")
            if f"RANK={rank}".encode() in variables and any(one.startswith(b"LOCAL_RANK=") for one in variables):
                return candidate
    return None


def send(number: signal.Signals, pids: Iterable[int]) -> int:
    """Send a signal to each; how many were still there."""
    reached = 0
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            reached += 1
    return reached
