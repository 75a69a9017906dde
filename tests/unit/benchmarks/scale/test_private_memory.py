"""What benchmarks call memory of a process."""

from __future__ import annotations

import mmap
from pathlib import Path

from benchmarks.scale.private_memory import Memory, PeakMemory, private_mib

MIB = 1 << 20
SIZE_MIB = 32
NEARLY_MIB = 28  # other memory comes and goes meanwhile


def test_mapped_pages_of_a_file_that_was_just_written_are_not_own_memory(memory: Path) -> None:
    """The kernel counts them as private and dirty, until they are written back."""
    path = memory / "file"
    path.write_bytes(bytes(SIZE_MIB * MIB))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as pages:
        before, own_mib = Memory.now(), private_mib()
        assert sum(pages[:: mmap.PAGESIZE]) == 0
        now = Memory.now()
        assert private_mib() - own_mib < SIZE_MIB - NEARLY_MIB
    assert now.own_mib - before.own_mib < SIZE_MIB - NEARLY_MIB
    assert now.mapped_mib - before.mapped_mib > NEARLY_MIB


def test_memory_that_was_freed_again_is_in_the_peak() -> None:
    before = Memory.now()
    peak = PeakMemory(watch_s=0.01)
    held = mmap.mmap(-1, SIZE_MIB * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    held.write(bytes(SIZE_MIB * MIB))
    most = peak.stop()
    held.close()
    assert most.own_mib - before.own_mib > NEARLY_MIB
    assert private_mib() - before.own_mib < SIZE_MIB - NEARLY_MIB
