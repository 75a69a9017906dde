"""Sizes and checksums of files, to find damaged or missing copies."""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import google_crc32c

from vlmpipe.trainer.errors import UserError
from vlmpipe.trainer.storage.base import ObjectInfo, Storage, cache_folder, crc32c_of_file
from vlmpipe.trainer.storage.records import seal, unseal
from vlmpipe.trainer.storage.regular_files import open_lock
from vlmpipe.trainer.storage.transfer import in_parallel

REMEMBERED_BYTES = 1 << 26  # smaller files are read again by each process: that takes a hundredth of a second
SUMS_FOLDER = ".sums"  # in the cache folder
KEPT_SUMS = 256  # of some 100 bytes
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
SUMMED_BYTES = 1 << 18  # at a time
UPLOADS = 8  # in parallel: small files mostly wait, in a bucket for the answer, in a folder for the disk


@dataclass(frozen=True)
class FileSum:
    """Size and CRC32C of a whole file."""

    bytes: int
    crc32c: int

    @classmethod
    def of(cls, path: Path) -> FileSum:
        return cls(path.stat().st_size, crc32c_of_file(path))

    @classmethod
    def once_a_machine(cls, path: Path) -> FileSum:
        """Return the sum of a file; a large one is read by one process of a machine for the others.

        The sum is remembered until the file is replaced or written to, or the machine starts again. Where the cache
        folder cannot be written to or locked, each process reads the file: local data needs no cache.
        """
        status = path.stat()
        if status.st_size < REMEMBERED_BYTES:
            return cls.of(path)
        identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns, _boot_id())
        with suppress(UserError, OSError):
            folder = cache_folder() / SUMS_FOLDER
            place = folder / f"{hashlib.sha256(repr(identity).encode()).hexdigest()[:32]}.json"
            folder.mkdir(exist_ok=True)
            with os.fdopen(open_lock(place.with_suffix(".lock")), "w", encoding="utf-8") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # one process reads the file, the others wait
                with suppress(FileNotFoundError, ValueError):
                    known = cls(**unseal(place.read_bytes(), required=True))
                    os.utime(place)
                    return known
                file_sum = cls.of(path)
                with suppress(OSError):  # a full disk
                    place.write_bytes(seal(asdict(file_sum)))
                    _delete_oldest(folder)
                return file_sum
        return cls.of(path)

    def matches(self, store: Storage, info: ObjectInfo | None) -> bool:
        """Return whether the object is there and whole. A bucket keeps the checksum; in a folder the file is read."""
        if info is None or info.size_bytes != self.bytes:
            return False
        stored = crc32c_in(store, info)
        return self.crc32c == (crc32c_of_file(store.fetch(info.name)) if stored is None else stored)


class SummedFile(io.RawIOBase):
    """A file that is written once, from start to end, and summed meanwhile."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=0)
        self._bytes = self._crc32c = 0

    @property
    def sum(self) -> FileSum:
        return FileSum(self._bytes, self._crc32c)

    def writable(self) -> bool:
        return True

    def write(self, data: bytes | bytearray | memoryview) -> int:  # type: ignore[override]
        import numpy as np  # what only compiles needs none

        # The checksum's extension takes arrays, and no memoryviews. A piece stays in the processor's cache.
        whole = np.frombuffer(memoryview(data), np.uint8)
        for start in range(0, len(whole), SUMMED_BYTES):
            piece = whole[start : start + SUMMED_BYTES]
            self._crc32c = int(google_crc32c.extend(self._crc32c, piece))
            rest = piece.data
            while rest:
                rest = rest[self._file.write(rest) :]
        self._bytes += len(whole)
        return len(whole)

    def close(self) -> None:
        self._file.close()
        super().close()


def crc32c_in(store: Storage, info: ObjectInfo) -> int | None:
    """The checksum that the store keeps of a listed object, also where it must be asked for; None if it keeps none."""
    if info.crc32c is not None:
        return info.crc32c
    stored = store.stat(info.name)
    return stored.crc32c if stored else None


def damaged_files(store: Storage, expected: Mapping[str, FileSum]) -> list[str]:
    """Names of the files that are missing or differ from their sums."""
    there = {info.name: info for info in store.list()}
    whole = in_parallel(lambda name: expected[name].matches(store, there.get(name)), expected)
    return [name for name, is_whole in zip(expected, whole, strict=True) if not is_whole]


def files_below(folder: Path) -> dict[str, Path]:
    """Every file in and below the folder, by its name in a store."""
    return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}


def upload_folder(store: Storage, folder: Path) -> dict[str, FileSum]:
    """Upload every file of the folder. Returns their sums, which the stored bytes have."""

    def upload(file: tuple[str, Path]) -> tuple[str, FileSum]:
        name, path = file
        sums = FileSum.of(path)
        store.upload(path, name, crc32c=sums.crc32c)
        return name, sums

    return dict(in_parallel(upload, files_below(folder).items(), threads=UPLOADS))


def _delete_oldest(folder: Path) -> None:
    """Delete all sums but those of the last KEPT_SUMS files that were asked for: most are of files that are gone.

    A process that waits for a deleted lock reads the file again, and finds the same sum.
    """
    sums = sorted(folder.glob("*.json"), key=lambda place: place.stat().st_mtime_ns)
    for place in sums[:-KEPT_SUMS]:
        for path in (place, place.with_suffix(".lock")):
            path.unlink(missing_ok=True)


@cache
def _boot_id() -> str:
    """Another one after each start of the machine, where its system has one."""
    with suppress(OSError):
        return BOOT_ID.read_text(encoding="ascii")
    return ""
