"""A rank on a CPU uses the memory of freed tensors again."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

# Page faults of making tensors of 160 MB three times more, after they were made and freed once: where freed memory is
# kept, and where it is not. Each in a fork of a process that has made no tensor.
FAULTS = """
import os, resource, torch
from vlmpipe.trainer.distributed.process import keep_freed_memory
for begin in (keep_freed_memory, lambda: None):
    if not os.fork():
        begin()
        for number in range(4):
            if number == 1:
                before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            made = [torch.ones(2_000_000) for _ in range(20)]
            del made
        print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before, flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library has no mallopt")
def test_freed_memory_is_used_again() -> None:
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    kept, returned = map(int, done.stdout.split())
    assert kept < returned / 2  # how many pages a fault fills differs from run to run
