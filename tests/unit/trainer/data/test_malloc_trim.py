"""Freed memory goes back to the system."""

from __future__ import annotations

import ctypes
import random
from pathlib import Path

import pyarrow as pa
import pytest

from vlmpipe.trainer.data.malloc_trim import trim_memory

MIB = 1 << 20


def resident_bytes() -> int:
    line = next(
        line for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines() if line.startswith("VmRSS")
    )
    return int(line.split()[1]) * 1024


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library has no malloc_trim")
def test_freed_blocks_between_others_go_back() -> None:
    """Small blocks, which the C library does not return of itself while one above them is in use."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    blocks = [libc.malloc(16_384) for _ in range(64 * MIB // 16_384)]
    for block in blocks:
        ctypes.memset(block, 1, 16_384)
    kept = blocks.pop()
    random.Random(0).shuffle(blocks)
    for block in blocks:
        libc.free(block)
    before = resident_bytes()
    trim_memory()
    assert resident_bytes() < before - 48 * MIB
    libc.free(kept)


def test_arrows_pool_may_be_asked_at_any_time() -> None:
    table = pa.table({"number": range(1000)})
    trim_memory()
    assert table.column("number").to_pylist() == list(range(1000))
