"""Packing plans of large data sets, made once a machine: files that all its processes map.

A plan is a pure function, so whichever process needs it first makes it, while the others wait for its lock; the kernel
ends the lock of a killed process, and the next one makes the plan. Several processes that ask for several epochs make
them side by side. Files are named after a digest of all that decides a plan, and end with a digest of their content.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vlmpipe.trainer.data import mixture, packing
from vlmpipe.trainer.data.malloc_trim import trim_memory
from vlmpipe.trainer.data.packing import Int64Array, PackingPlan
from vlmpipe.trainer.data.prefixes import groups, items
from vlmpipe.trainer.data.shards.disk_cache import alone
from vlmpipe.trainer.data.window_packing import best_fit, side_by_side, windows
from vlmpipe.trainer.errors import UserError, print_warning
from vlmpipe.trainer.storage.base import cache_folder
from vlmpipe.trainer.storage.regular_files import open_regular

FROM_SAMPLES = 200_000  # below, each process plans an epoch in less than about 0.2 s, and no file is worth it
CACHE_FOLDER = ".plans"
# Files on a machine, those used last. Plans: of two runs, this epoch's and the next one's. Counts have 40 bytes each.
KEPT = {"plan": 4, "count": 1024}
PART_NS = 3600 * 10**9  # a part that was not written to for so long was left by a killed process
LOCKS = 64  # lock files; epochs that share one wait for each other, and nothing else changes
WORD = np.dtype("<i8")
PACKING = (packing, best_fit, side_by_side, windows, mixture, groups, items)  # another version may pack another way
DIGEST_BYTES = hashlib.sha256().digest_size

IN_MEMORY = (
    "each process plans its epochs by itself, in 16 bytes a sample of its memory; set VLMPIPE_CACHE_DIR to a disk with "
    "room and locks"
)

Make = Callable[[int], PackingPlan]


class MachinePlans:
    """The plans of one order of one data set, by epoch. Without room or locks on the disk, plans stay in memory."""

    def __init__(self, folder: Path, decides: Iterable[bytes | NDArray[np.generic]], make: Make) -> None:
        """
        Args:
            decides: all that `make` depends on beside the epoch and the code of packing and mixtures.
            make: the plan of an epoch.
        """
        digest = hashlib.sha256()
        for module in PACKING:
            digest.update(Path(str(module.__file__)).read_bytes())
        for part in decides:
            content = part if isinstance(part, bytes) else np.ascontiguousarray(part).data
            digest.update(f"{len(part)} ".encode())
            digest.update(content)
        self._folder, self._key, self._make = folder, digest.hexdigest()[:32], make
        self._in_memory = False

    def plan(self, epoch: int) -> PackingPlan:
        """The packed sequences of an epoch, mapped from the file that holds them."""
        if self._in_memory:
            return self._make(epoch)
        path = self._path(epoch, "plan")
        try:
            words = _mapped(path)
            if words is None:
                with alone(self._lock(epoch)):
                    words = _mapped(path)  # another process may have made it meanwhile
                    if words is None:
                        plan = self._write_plan(epoch)
                        words = _mapped(path)
                        if words is None and not path.exists():  # newer plans of other runs have taken its place
                            return plan
            if words is None:
                raise OSError(errno.EIO, "what was written is not what is read")
            with contextlib.suppress(FileNotFoundError):  # another run has deleted it; it stays mapped
                os.utime(path)
        except OSError as error:
            return self._without_files(epoch, error)
        sequences = int(words[0])
        return PackingPlan(words[2 : sequences + 3], words[sequences + 3 :], float(words[1:2].view("<f8")[0]))

    def sequences(self, epochs: range) -> list[int]:
        """The number of sequences of each epoch. Processes that ask at the same time share the work."""
        by_epoch = {epoch: self._counted(epoch, wait=False) for epoch in epochs}
        by_epoch |= {epoch: self._counted(epoch, wait=True) for epoch, count in by_epoch.items() if count is None}
        counts = [count for count in by_epoch.values() if count is not None]
        assert len(counts) == len(epochs), "who waits gets a count"
        return counts

    def _counted(self, epoch: int, *, wait: bool) -> int | None:
        """Sequences of an epoch; None where another process is making its plan and this one does not wait."""
        if self._in_memory:
            return len(self._make(epoch))
        path = self._path(epoch, "count")
        try:
            words = _mapped(path)
            if words is None:
                with alone(self._lock(epoch), wait=wait) as held:
                    if not held:
                        return None
                    words = _mapped(path)
                    if words is None:
                        words = np.array([len(self._make(epoch))], WORD)
                        self._write("count", epoch, [words])
            return int(words[0])
        except OSError as error:
            return len(self._without_files(epoch, error))

    def _write_plan(self, epoch: int) -> PackingPlan:
        """Make the plan of an epoch whose lock this process holds, and write it and its count."""
        plan = self._make(epoch)
        sequences, fill = np.array([len(plan)], WORD), np.array([plan.fill], "<f8").view(WORD)
        self._write("plan", epoch, [sequences, fill, plan.offsets.astype(WORD), plan.members.astype(WORD)])
        self._write("count", epoch, [sequences])
        return plan

    def _write(self, kind: str, epoch: int, arrays: list[Int64Array]) -> None:
        write(self._path(epoch, kind), arrays)
        trim_memory()  # planning took about 100 bytes a sample
        _delete_oldest(self._folder, kind)

    def _without_files(self, epoch: int, error: OSError) -> PackingPlan:
        self._in_memory = True
        print_warning(f"{self._folder} cannot keep packing plans: {error.strerror}: {IN_MEMORY}")
        return self._make(epoch)

    def _path(self, epoch: int, kind: str) -> Path:
        return self._folder / f"{self._key}-{epoch}.{kind}"

    def _lock(self, epoch: int) -> Path:
        self._folder.mkdir(exist_ok=True)
        return self._folder / f"{(int(self._key[:8], 16) + epoch) % LOCKS}.lock"


def of_machine(decides: Iterable[bytes | NDArray[np.generic]], make: Make) -> MachinePlans | None:
    """Plans in this machine's cache folder; None, and a warning, where no file can be kept there."""
    try:
        return MachinePlans(cache_folder() / CACHE_FOLDER, decides, make)
    except UserError as error:  # as a read-only temporary folder: local data is read without a cache
        print_warning(f"{error.found}: {IN_MEMORY}")
        return None


def _mapped(path: Path) -> Int64Array | None:
    """The file's words, shared by all processes that map it; None where it is absent or damaged."""
    try:
        with open_regular(path) as file:
            content = np.memmap(file, np.uint8, "r")
    except (FileNotFoundError, ValueError):  # NumPy's error for an empty file
        return None
    stop = len(content) - DIGEST_BYTES
    if stop < WORD.itemsize or stop % WORD.itemsize:
        return None
    if hashlib.sha256(content[:stop].data).digest() != content[stop:].tobytes():
        return None
    return np.asarray(content[:stop].view(WORD))


def write(path: Path, arrays: list[Int64Array]) -> None:
    """Write words and their digest; the file appears whole or not at all."""
    digest, part = hashlib.sha256(), path.with_name(f"{path.name}.part")  # written under its lock
    try:
        with part.open("wb") as file:
            for array in arrays:
                digest.update(array.data)
                file.write(array.data)
            file.write(digest.digest())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _delete_oldest(folder: Path, kind: str) -> None:
    """Delete the files whose last use is longest ago, and parts that killed processes left.

    Whoever has mapped a file keeps its content.
    """
    used: list[tuple[int, Path]] = []
    for path in folder.glob(f"*.{kind}*"):
        with contextlib.suppress(FileNotFoundError):
            used_ns = path.stat().st_mtime_ns
            if path.suffix != ".part":
                used.append((used_ns, path))
            elif time.time_ns() - used_ns > PART_NS:
                path.unlink()
    for _, path in sorted(used)[: -KEPT[kind]]:
        path.unlink(missing_ok=True)
