"""The threads in which a process decodes and prepares images.

Pillow's and NumPy's loops let go of Python's lock, so that threads share the cores; one thread makes 15 to 100 images
of a megapixel a second, which a GPU with a small model may have to wait for.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from vlmpipe.trainer.sizing.image_preparation import threads_of
from vlmpipe.trainer.threads import thread_pool

Item = TypeVar("Item")
Result = TypeVar("Result")


def num_threads() -> int:
    """Return the threads for images of this process, which shares the machine's cores with other ranks."""
    return threads_of(len(os.sched_getaffinity(0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


def for_each(prepare: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Results in the order of the items. Raises the error of the first item that has one."""
    if len(items) == 1 or num_threads() == 1:
        return [prepare(item) for item in items]
    return list(_pool().map(prepare, items))


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return thread_pool(num_threads(), name="images")


os.register_at_fork(after_in_child=_pool.cache_clear)  # a child has none of its parent's threads
