"""Prepared data as a store: the manifest that completes it, and a check of every file that is read."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

from vlmpipe.trainer.data.shards.verified_files import FOLDER, damaged_file
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.base import ObjectInfo, Storage, crc32c_of
from vlmpipe.trainer.storage.file_sums import FileSum
from vlmpipe.trainer.storage.records import seal, unseal

DONE = "DONE"  # the manifest, written last; a folder without it is not prepared data


@dataclass(frozen=True)
class Manifest:
    """Every other file of prepared data, and the counts of its preparation."""

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


class PreparedFiles:
    """Reads prepared data and checks each file but the shards, which their readers check against the sidecars."""

    def __init__(self, storage: Storage) -> None:
        self._storage, self._files = storage, Manifest.read(storage).files

    def __getattr__(self, name: str) -> object:
        return getattr(self._storage, name)

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        """The files in the manifest. Raises DataError when one of them is missing."""
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
