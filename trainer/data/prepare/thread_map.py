"""Ordered `map` over threads with a bounded number of items in memory."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

MAX_THREADS = 32
# https://docs.kernel.org/admin-guide/cgroup-v2.html, "CPU Interface Files": quota and period in microseconds.
CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")

T = TypeVar("T")
R = TypeVar("R")


def cores() -> int:
    """Processor cores that this process may use: those of the machine, or the fewer that its container is given."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):  # not Linux's second control groups, or no limit ("max")
        quota, period = CPU_LIMIT.read_text().split()
        usable = min(usable, max(1, int(quota) // int(period)))
    return usable


def threads_for(processes: int) -> int:
    """Threads of each of that many processes, so that together they use the cores."""
    return max(1, min(MAX_THREADS, cores() // processes))


def map_in_order(
    function: Callable[[T], R], items: Iterable[T], threads: int, *, weigh: Callable[[T], int], max_bytes: int
) -> Iterator[R]:
    """`map` in threads. At most four items a thread are held, so that a large source never lies in memory.

    Args:
        weigh: bytes that an item and its result hold.
        max_bytes: what all items held may weigh together; a heavier one is held alone.
    """
    with ThreadPoolExecutor(threads, "prepare") as pool:
        pending: deque[tuple[Future[R], int]] = deque()
        held_bytes = 0
        for item in items:
            weight = weigh(item)
            while pending and (len(pending) == 4 * threads or held_bytes + weight > max_bytes):
                future, freed = pending.popleft()
                yield future.result()
                held_bytes -= freed
            pending.append((pool.submit(function, item), weight))
            held_bytes += weight
        while pending:
            yield pending.popleft()[0].result()
