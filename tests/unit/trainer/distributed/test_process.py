"""A rank on a CPU uses the memory of freed tensors again."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

# Page faults of making tensors of 320 MB three times more, after they were made and freed once.
FAULTS = """
import resource, torch
from vlmpipe.trainer.distributed.process import keep_freed_memory
{call}
for number in range(4):
    if number == 1:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    made = [torch.ones(2_000_000) for _ in range(40)]
    del made
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(call: str) -> int:
    done = subprocess.run([sys.executable, "-c", FAULTS.format(call=call)], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library has no mallopt")
def test_freed_memory_is_used_again() -> None:
    kept, returned = faults("keep_freed_memory()"), faults("")
    assert kept < returned / 2  # how many pages a fault fills differs from run to run
