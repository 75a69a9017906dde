"""Private memory of a process."""

from __future__ import annotations

import threading
from pathlib import Path

MIB = 1 << 20
WATCH_S = 0.5


def private_mib() -> float:
    """Memory of this process that no other shares and that is not a file's."""
    for line in Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines():
        if line.startswith("Private_Dirty:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("no Private_Dirty in /proc/self/smaps_rollup")


class PeakMemory:
    """The most private memory of this process, looked at every `watch_s`."""

    def __init__(self, watch_s: float = WATCH_S) -> None:
        self._most, self._watch_s, self._ended = 0.0, watch_s, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> float:
        """The most until now, in MiB."""
        self._ended.set()
        self._thread.join()
        return max(self._most, private_mib())

    def _watch(self) -> None:
        while not self._ended.wait(self._watch_s):
            self._most = max(self._most, private_mib())
