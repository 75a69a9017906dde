"""Private memory of a process."""

from __future__ import annotations

from pathlib import Path

MIB = 1 << 20


def private_mib() -> float:
    """Memory of this process that no other shares and that is not a file's."""
    for line in Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines():
        if line.startswith("Private_Dirty:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("no Private_Dirty in /proc/self/smaps_rollup")
