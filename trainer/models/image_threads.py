"""The threads in which a process decodes and prepares images.

Pillow's and NumPy's loops let go of Python's lock, so that threads share the cores; one thread makes 15 to 100 images
of a megapixel a second, which a GPU with a small model may have to wait for.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, TypeVar

from vlmpipe.trainer.sizing.image_preparation import max_threads_of, threads_of
from vlmpipe.trainer.threads import thread_pool

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass
class _Chosen:
    """Threads that `use_threads` or `more_threads` has chosen."""

    threads: int | None = None  # None begins with the default
    may_grow: bool = True


_chosen = _Chosen()


def use_threads(setting: int | Literal["auto"]) -> None:
    """Prepare images in this many threads of this process; with auto, in as many as `more_threads` finds useful."""
    _chosen.threads, _chosen.may_grow = (None, True) if setting == "auto" else (setting, False)
    _pool.cache_clear()


def num_threads() -> int:
    """Return the threads for images of this process, which shares the machine's cores with other ranks."""
    return threads_of(*_cores_and_ranks()) if _chosen.threads is None else _chosen.threads


def max_useful_threads() -> int:
    """Return this rank's share of the machine's cores."""
    return max_threads_of(*_cores_and_ranks())


def max_threads() -> int:
    """Return the most threads that this process may come to have."""
    return max(num_threads(), max_useful_threads()) if _chosen.may_grow else num_threads()


def more_threads() -> int:
    """Double the threads, up to this rank's share of the cores, as training waits for images.

    Returns their new number; 0 where it stays, at that share or by a setting.
    """
    before = num_threads()
    if (threads := min(2 * before, max_threads())) == before:
        return 0
    _chosen.threads = threads
    _pool.cache_clear()  # the one before ends with its last image
    return threads


def _cores_and_ranks() -> tuple[int, int]:
    return len(os.sched_getaffinity(0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def for_each(prepare: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Results in the order of the items. Raises the error of the first item that has one."""
    if len(items) == 1 or num_threads() == 1:
        return [prepare(item) for item in items]
    return list(_pool().map(prepare, items))


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return thread_pool(num_threads(), name="images")


os.register_at_fork(after_in_child=_pool.cache_clear)  # a child has none of its parent's threads
