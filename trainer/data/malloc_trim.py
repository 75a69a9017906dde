"""Returns freed memory to the operating system, which allocators would otherwise keep."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import pyarrow as pa


def trim_memory() -> None:
    """What Arrow's pool and the C library keep of freed memory. Takes milliseconds: for the end of a large piece of
    work.

    Without it a process that prepares chunk after chunk grows, although no chunk leaves anything behind: freed blocks
    lie between others, and each new chunk asks for others again.
    """
    pa.default_memory_pool().release_unused()
    if trim := _malloc_trim():
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    """glibc has it, other C libraries need not."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
