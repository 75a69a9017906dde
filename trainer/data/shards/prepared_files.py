"""Prepared data as a store: the manifest that completes it, and a check of every file against it at every use."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from trainer.data.shards.verified_files import FOLDER, damaged_file
from trainer.storage import open_storage
from trainer.storage.base import ObjectInfo, Storage, crc32c_of, crc32c_of_file
from trainer.storage.records import seal, unseal

DONE = "DONE"  # the manifest, written last: what lacks it is not prepared data
READERS = 4  # files that are checked at the same time


@dataclass(frozen=True)
class FileSum:
    """What a whole file looks like."""

    bytes: int
    crc32c: int

    @classmethod
    def of(cls, path: Path) -> FileSum:
        return cls(path.stat().st_size, crc32c_of_file(path))


@dataclass(frozen=True)
class Manifest:
    """Every file of prepared data but the manifest itself, and the counts of its preparation."""

    format: int
    fingerprint: str
    counts: dict[str, int]
    files: dict[str, FileSum]

    def to_bytes(self) -> bytes:
        return seal(asdict(self), indent=1)

    @classmethod
    def read(cls, storage: Storage) -> Manifest:
        """Raises DataError for one that is damaged, UserError where there is none."""
        try:
            values = unseal(storage.read(DONE), required=True)
        except ValueError as error:
            raise damaged_file(storage.uri(DONE), str(error)) from error
        return cls(**values | {"files": {name: FileSum(**sums) for name, sums in values["files"].items()}})

    def damaged(self, storage: Storage) -> list[str]:
        """Files that are not there with their bytes. A bucket tells; of a folder everything is read."""
        there = {info.name: info for info in storage.list()}

        def holds(name: str) -> bool:
            info, sums = there.get(name), self.files[name]
            if info is None or info.size_bytes != sums.bytes:
                return False
            return sums.crc32c == (crc32c_of_file(storage.fetch(name)) if info.crc32c is None else info.crc32c)

        with ThreadPoolExecutor(READERS, "check") as pool:
            return [name for name, whole in zip(self.files, pool.map(holds, self.files), strict=True) if not whole]


class PreparedFiles:
    """Reads prepared data; each file is checked on its way. Shards are not: their readers do that, by the sidecars."""

    def __init__(self, storage: Storage) -> None:
        self._storage, self._files = storage, Manifest.read(storage).files

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        """What the manifest knows. Raises DataError when one of these files is missing."""
        there = {info.name: info for info in self._storage.list(prefix)}
        for name in self._files:
            if name.startswith(f"{prefix}/" if prefix else "") and name not in there:
                raise damaged_file(self._storage.uri(name), "it is missing")
        return [info for name, info in there.items() if name in self._files]

    def read(self, name: str) -> bytes:
        """Raises DataError when the bytes are not those that were prepared."""
        data = self._storage.read(name)
        self._compare(name, FileSum(len(data), crc32c_of(data)))
        return data

    def fetch(self, name: str) -> Path:
        """Raises DataError as `read` does."""
        path = self._storage.fetch(name)
        if not (name.startswith(f"{FOLDER}/") and name.endswith(".tar")):
            self._compare(name, FileSum.of(path))
        return path

    def _compare(self, name: str, found: FileSum) -> None:
        expected = self._files.get(name)
        if expected is None:
            raise damaged_file(self._storage.uri(name), f"{DONE} does not list it")
        if found.bytes != expected.bytes:
            raise damaged_file(self._storage.uri(name), f"{found.bytes} bytes instead of {expected.bytes}")
        if found != expected:
            raise damaged_file(self._storage.uri(name), f"its checksum (CRC32C) differs from that in {DONE}")


def open_prepared(uri: str) -> Storage:
    """The store of prepared data, to read from. Raises UserError where there is none, DataError for a damaged one."""
    return cast(Storage, PreparedFiles(open_storage(uri)))
