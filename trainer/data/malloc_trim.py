"""Returns freed memory to the operating system."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import pyarrow as pa


def trim_memory() -> None:
    """Release the freed memory that Arrow's pool and the C library hold. Takes milliseconds.

    Without it, fragmentation makes a process that prepares many chunks grow.
    """
    pa.default_memory_pool().release_unused()
    if trim := _malloc_trim():
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    """Return glibc's malloc_trim, or None with another C library."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
