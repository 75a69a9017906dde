"""Shards as local files, each verified against its sidecar before its first use."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from vlmpipe.trainer.errors import DataError, os_errors
from vlmpipe.trainer.storage.base import Storage, crc32c_of_file

FOLDER = "shards"


@dataclass(frozen=True, slots=True)
class Sidecar:
    """Size and checksum of a whole shard."""

    shard: str
    samples: int
    bytes: int
    crc32c: int


class Sums(Protocol):
    """Expected size and checksum of a file. `crc32c` is None for a source's file in a bucket that keeps none."""

    @property
    def bytes(self) -> int: ...
    @property
    def crc32c(self) -> int | None: ...


class ShardSet(Protocol):
    """The shards of one store, with their sizes and checksums."""

    kind: str  # for messages, and the cache's folder
    storage: Storage

    def sizes(self) -> dict[str, int]:
        """Bytes of each shard by name."""
        ...

    def sidecar(self, shard: str) -> Sums:
        """Raises DataError when the shard or its sidecar is missing."""
        ...

    def damaged(self, shard: str, how: str) -> DataError:
        """The error of a shard that is damaged in the store."""
        ...


class DataShards:
    """The shards of prepared data."""

    kind = "data"

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    def sizes(self) -> dict[str, int]:
        return {info.name: info.size_bytes for info in self.storage.list(FOLDER) if info.name.endswith(".tar")}

    def sidecar(self, shard: str) -> Sidecar:
        for name in (sidecar_name(shard), shard):
            if self.storage.stat(name) is None:
                raise self.damaged(shard, f"{self.storage.uri(name)} is missing")
        try:
            return Sidecar(**json.loads(self.storage.read(sidecar_name(shard))))
        except (ValueError, TypeError) as error:
            raise self.damaged(shard, f"its sidecar cannot be read: {error}") from error

    def damaged(self, shard: str, how: str) -> DataError:
        return damaged_file(f"shard {shard}", how)


class ShardFiles(Protocol):
    """Opens shards for a reader. Safe to use from several threads."""

    shards: ShardSet

    def opened(self, shard: str) -> AbstractContextManager[int]:
        """A descriptor of the verified shard for the block. Raises DataError when it is missing or damaged."""
        ...


class ShardsInPlace:
    """Shards in a local folder. Files are opened for each read, because there may be thousands."""

    def __init__(self, shards: ShardSet) -> None:
        self.shards = shards
        self._paths: dict[str, Path] = {}  # of verified shards
        self._lock = threading.Lock()

    @contextmanager
    def opened(self, shard: str) -> Iterator[int]:
        path = self._verified(shard)
        with os_errors(f"reading {path}"):
            handle = os.open(path, os.O_RDONLY)
        try:
            yield handle
        finally:
            os.close(handle)

    def _verified(self, shard: str) -> Path:
        with self._lock:
            if shard not in self._paths:
                sidecar, path = self.shards.sidecar(shard), self.shards.storage.fetch(shard)
                if problem := mismatch(path, sidecar):
                    raise self.shards.damaged(shard, problem)
                self._paths[shard] = path
            return self._paths[shard]


def damaged_file(name: str, how: str) -> DataError:
    """The error of a damaged file of prepared data."""
    return DataError(
        f"{name} is damaged: {how}",
        expected="the bytes that prepare_data wrote",
        fix="run the same command again: prepare_data checks all files and prepares damaged data again",
    )


def sidecar_name(shard: str) -> str:
    return shard.removesuffix(".tar") + ".json"


def mismatch(path: Path, sidecar: Sums) -> str:
    """How a file differs from its sidecar; "" when it is whole."""
    with os_errors(f"reading {path}"):
        size_bytes = path.stat().st_size
        if size_bytes != sidecar.bytes:
            return f"{size_bytes} bytes instead of {sidecar.bytes}"
        if sidecar.crc32c is not None and crc32c_of_file(path) != sidecar.crc32c:
            return "its checksum (CRC32C) differs from its sidecar's"
    return ""
