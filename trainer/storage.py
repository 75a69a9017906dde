"""The one seam to storage: a small protocol bound to a root, and its local-folder implementation.

Every writer and reader of run outputs, prepared data, features and checkpoints goes through `open_storage(uri)`.
Names are relative to the root, with `/` between parts; a name can never leave the root.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Protocol

import google_crc32c

from trainer.errors import ConfigError, ExitCode, UserError, os_errors

CHUNK_BYTES = 8 << 20


@dataclass(frozen=True)
class ObjectInfo:
    """What a store knows of one object. `version` changes with every overwrite (a generation on GCS)."""

    name: str
    size_bytes: int
    version: str


class AlreadyExistsError(Exception):
    """A create-only write found an object of that name."""


class VersionConflictError(Exception):
    """A compare-and-swap found another version than the one it expected."""


class Storage(Protocol):
    """Objects under one root. Every write is atomic: readers see the old or the new object, never part of one."""

    root_uri: str

    def uri(self, name: str) -> str: ...
    def list(self, prefix: str = "") -> list[ObjectInfo]: ...
    def stat(self, name: str) -> ObjectInfo | None: ...
    def read(self, name: str) -> bytes: ...
    def write(self, name: str, data: bytes) -> None: ...
    def create(self, name: str, data: bytes) -> None: ...
    def replace(self, name: str, data: bytes, expected_version: str) -> None: ...
    def delete(self, name: str) -> None: ...
    def upload(self, path: Path, name: str) -> None: ...
    def fetch(self, name: str) -> Path: ...


def join_uri(base: str, *parts: str) -> str:
    """`base` and `parts` with exactly one slash between."""
    return "/".join([base.rstrip("/"), *(part.strip("/") for part in parts)])


def crc32c_of(data: bytes) -> int:
    """CRC32C (Castagnoli), the checksum that Google Cloud Storage keeps of every object."""
    return int(google_crc32c.value(data))


def crc32c_of_file(path: Path) -> int:
    """CRC32C of a file, read in chunks."""
    checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            checksum = google_crc32c.extend(checksum, chunk)
    return int(checksum)


class LocalStorage:
    """A folder. Atomic by write-to-temporary, fsync and rename; create-only by link, which fails if the name exists."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root).expanduser().resolve()
        self.root_uri = str(self.root)

    def uri(self, name: str) -> str:
        return str(self.path(name))

    def path(self, name: str) -> Path:
        """The file behind a name. Raises ConfigError for a name that would leave the root."""
        parts = PurePosixPath(name).parts
        if not parts or name.startswith("/") or ".." in parts:
            raise ConfigError(f"unsafe object name {name!r}", expected="a relative path without '..'")
        return self.root.joinpath(*parts)

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        base = self.path(prefix) if prefix else self.root
        if base.is_file():
            return [self._info(base)]
        found = []
        for folder, _, files in os.walk(base):
            found += [self._info(Path(folder, name)) for name in files if not name.startswith(".tmp-")]
        return sorted(found, key=lambda info: info.name)

    def stat(self, name: str) -> ObjectInfo | None:
        path = self.path(name)
        return self._info(path) if path.is_file() else None

    def read(self, name: str) -> bytes:
        with os_errors(f"reading {self.uri(name)}"):
            return self.path(name).read_bytes()

    def write(self, name: str, data: bytes) -> None:
        with os_errors(f"writing {self.uri(name)}"):
            temporary = self._temporary(name, data)
            os.replace(temporary, self.path(name))

    def create(self, name: str, data: bytes) -> None:
        with os_errors(f"writing {self.uri(name)}"):
            temporary = self._temporary(name, data)
            try:
                os.link(temporary, self.path(name))
            except FileExistsError as error:
                raise AlreadyExistsError(self.uri(name)) from error
            finally:
                os.unlink(temporary)
            _fsync_folder(self.path(name).parent)

    def replace(self, name: str, data: bytes, expected_version: str) -> None:
        path = self.path(name)
        with os_errors(f"writing {self.uri(name)}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path.parent / f".tmp-lock-{path.name}", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                info = self.stat(name)
                if (info.version if info else "") != expected_version:
                    raise VersionConflictError(self.uri(name))
                self.write(name, data)

    def delete(self, name: str) -> None:
        with os_errors(f"deleting {self.uri(name)}"):
            self.path(name).unlink(missing_ok=True)

    def upload(self, path: Path, name: str) -> None:
        target = self.path(name)
        with os_errors(f"writing {self.uri(name)}"):
            target.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(prefix=".tmp-", dir=target.parent)
            try:
                with os.fdopen(handle, "wb") as sink, path.open("rb") as source:
                    shutil.copyfileobj(source, sink, CHUNK_BYTES)
                    sink.flush()
                    os.fsync(sink.fileno())
                os.replace(temporary, target)
            except BaseException:
                Path(temporary).unlink(missing_ok=True)
                raise
            _fsync_folder(target.parent)

    def fetch(self, name: str) -> Path:
        """A local file with the object's bytes: here the object itself, so callers must not change it."""
        path = self.path(name)
        if not path.is_file():
            raise UserError(f"no such file: {path}", code=ExitCode.CONFIG)
        return path

    def _temporary(self, name: str, data: bytes) -> str:
        target = self.path(name)
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=".tmp-", dir=target.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            os.unlink(temporary)
            raise
        os.chmod(temporary, 0o644)
        return temporary

    def _info(self, path: Path) -> ObjectInfo:
        stat = path.stat()
        name = path.relative_to(self.root).as_posix()
        return ObjectInfo(name, stat.st_size, f"{stat.st_mtime_ns}-{stat.st_ino}")


def _fsync_folder(folder: Path) -> None:
    """Make a rename or link durable: the folder's own entry must reach the disk too."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def open_storage(root_uri: str) -> Storage:
    """The store behind a URI: a local path or `file://` path. Raises ConfigError for a scheme it cannot serve."""
    if root_uri.startswith("gs://"):
        from trainer.storage_gcs import GcsStorage

        return GcsStorage(root_uri)
    if "://" in root_uri and not root_uri.startswith("file://"):
        raise ConfigError(f"storage {root_uri!r} has an unknown scheme", expected="a local path or gs://bucket/path")
    return LocalStorage(root_uri.removeprefix("file://"))
