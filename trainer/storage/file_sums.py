"""Sizes and checksums of files, to find damaged or missing copies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vlmpipe.trainer.storage.base import ObjectInfo, Storage, crc32c_of_file
from vlmpipe.trainer.storage.transfer import in_parallel

UPLOADS = 8  # in parallel: small files mostly wait, in a bucket for the answer, in a folder for the disk


@dataclass(frozen=True)
class FileSum:
    """Size and CRC32C of a whole file."""

    bytes: int
    crc32c: int

    @classmethod
    def of(cls, path: Path) -> FileSum:
        return cls(path.stat().st_size, crc32c_of_file(path))

    def matches(self, store: Storage, info: ObjectInfo | None) -> bool:
        """Return whether the object is there and whole. A bucket keeps the checksum; in a folder the file is read."""
        if info is None or info.size_bytes != self.bytes:
            return False
        kept = crc32c_in(store, info)
        return self.crc32c == (crc32c_of_file(store.fetch(info.name)) if kept is None else kept)


def crc32c_in(store: Storage, info: ObjectInfo) -> int | None:
    """The checksum that the store keeps of a listed object, also where it must be asked for; None if it keeps none."""
    if info.crc32c is not None:
        return info.crc32c
    found = store.stat(info.name)
    return found.crc32c if found else None


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
