"""Memory of a process: its own, and pages of the files that it maps."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path

MIB = 1 << 20


@dataclass(frozen=True)
class Memory:
    """Memory in MiB.

    own_mib: that of no file. mapped_mib: pages of mapped files, which the kernel writes back and frees when memory is
    short; those that were just written are among "Private_Dirty" while one process maps them.
    """

    own_mib: float
    mapped_mib: float

    @classmethod
    def now(cls) -> Memory:
        """Of this process."""
        lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()[1:]
        kib = {name: int(rest.split()[0]) for name, rest in (line.split(":") for line in lines)}
        return cls(kib["Anonymous"] / 1024, (kib["Rss"] - kib["Anonymous"]) / 1024)


def private_mib() -> float:
    """Memory of this process that no other shares and that is not a file's."""
    return Memory.now().own_mib


class PeakMemory:
    """The most memory of this process, looked at every `watch_s`; own memory and mapped files each at their peak."""

    def __init__(self, watch_s: float) -> None:
        self._most, self._watch_s, self._ended = Memory(0.0, 0.0), watch_s, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> Memory:
        """The most until now."""
        self._ended.set()
        self._thread.join()
        self._look()
        return self._most

    def _watch(self) -> None:
        while not self._ended.wait(self._watch_s):
            self._look()

    def _look(self) -> None:
        now = Memory.now()
        self._most = Memory(max(self._most.own_mib, now.own_mib), max(self._most.mapped_mib, now.mapped_mib))
