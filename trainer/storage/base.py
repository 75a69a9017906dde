"""The one seam to storage: a small protocol bound to a root, and its local-folder implementation.

Every writer and reader of run outputs, prepared data, features and checkpoints goes through `open_storage(uri)`.
Names are relative to the root, with `/` between parts; a name can never leave the root.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Protocol

import google_crc32c

from trainer.errors import ConfigError, ExitCode, UserError, os_errors

BUCKETS_MOUNT = Path("/gcs")
CHUNK_BYTES = 8 << 20
TEMPORARY_PREFIX = ".tmp-"  # files that are not objects: half-written ones and locks


@dataclass(frozen=True)
class ObjectInfo:
    """What a store knows of one object. `version` changes with every overwrite (a generation on GCS)."""

    name: str
    size_bytes: int
    version: str
    crc32c: int | None = None  # as the store itself keeps it; None where it keeps none, as a folder does


class AlreadyExistsError(Exception):
    """A create-only write found an object of that name."""


class VersionConflictError(Exception):
    """A compare-and-swap found another version than the one it expected."""


class CorruptObjectError(UserError):
    """An object's bytes do not match the checksum that its store keeps (exit 65 unless a caller can fall back)."""

    def __init__(self, found: str) -> None:
        super().__init__(
            found,
            expected="bytes that match the CRC32C kept with them",
            fix="delete the object and let the step that wrote it write it again",
            code=ExitCode.DATA,
        )


class Storage(Protocol):
    """Objects under one root. Every write is atomic: readers see the old or the new object, never part of one.

    Names are cleaned by `clean_name`. A missing object is a UserError for `read` and `fetch`, None for `stat` and
    nothing to do for `delete`.
    """

    root_uri: str

    def uri(self, name: str) -> str:
        """The full URI of a name."""
        ...

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        """Every object in the folder `prefix` and below it (or the one object of that name), sorted by name."""
        ...

    def stat(self, name: str) -> ObjectInfo | None: ...

    def read(self, name: str) -> bytes: ...

    def write(self, name: str, data: bytes) -> None:
        """Write, replacing what is there."""
        ...

    def create(self, name: str, data: bytes) -> None:
        """Write only if nothing is there; of several writers exactly one succeeds. Raises AlreadyExistsError."""
        ...

    def replace(self, name: str, data: bytes, expected_version: str) -> None:
        """Write only over the version that `stat` gave ("" = nothing is there). Raises VersionConflictError."""
        ...

    def delete(self, name: str) -> None: ...

    def delete_folder(self, prefix: str) -> None:
        """Delete every object in the folder and below it. Not atomic: a reader may see some of them."""
        ...

    def upload(self, path: Path, name: str, *, crc32c: int | None = None) -> None:
        """Write the bytes of a local file of any size, replacing what is there.

        Args:
            crc32c: what the bytes must sum to, by whoever wrote them; without it the file is taken as it is. Raises
                CorruptObjectError, and writes nothing, when they do not.
        """
        ...

    def copy(self, name: str, new_name: str) -> None:
        """A second object with the bytes of the first, replacing what is there. No bytes travel through this machine.

        In a folder both share one file: it takes no space, and damage to the file is damage to both.
        """
        ...

    def fetch(self, name: str) -> Path:
        """A local file with the object's bytes, checked on the way. It may be shared: callers must not change it."""
        ...

    def download(self, name: str, path: Path) -> None:
        """Write the object's bytes, checked on the way, to a local file of the caller's own. Not atomic."""
        ...


def clean_name(name: str) -> str:
    """`name` in its one spelling, `a/b/c`. Raises ConfigError for a name that is empty or could leave the root."""
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or not name.isprintable():
        raise ConfigError(f"unsafe object name {name!r}", expected="a relative path of printable parts without '..'")
    return "/".join(parts)


def mounted(uri: str) -> Path:
    """A URI as a path of the file system: Vertex AI mounts every bucket at /gcs in every container.

    Good for reading files that others wrote and for TensorBoard, which only appends; never for what must be atomic.
    """
    if uri.startswith("gs://"):
        return BUCKETS_MOUNT / uri.removeprefix("gs://")
    return Path(uri).expanduser()


def join_uri(base: str, *parts: str) -> str:
    """`base` and `parts` with exactly one slash between."""
    return "/".join([base.rstrip("/"), *(part.strip("/") for part in parts)])


def cache_folder() -> Path:
    """Where this machine keeps copies of remote objects: VLMPIPE_CACHE_DIR, else a folder of this user's own."""
    if chosen := os.environ.get("VLMPIPE_CACHE_DIR"):
        return Path(chosen).expanduser()
    folder = Path(tempfile.gettempdir(), f"vlmpipe-cache-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise ConfigError(
            f"{folder} belongs to another user",
            expected="a cache folder that only this user writes",
            fix="set VLMPIPE_CACHE_DIR to a folder of your own",
        )
    return folder


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
    """A folder. Atomic by write-to-temporary, fsync and rename; create-only by link, which fails if the name exists.

    `replace` is atomic against other `replace` calls and against `create`, not against a plain `write`.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root).expanduser().resolve()
        self.root_uri = str(self.root)

    def uri(self, name: str) -> str:
        return str(self.path(name))

    def path(self, name: str) -> Path:
        """The file behind a name. Raises ConfigError for a name that would leave the root."""
        return self.root / clean_name(name)

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        base = self.path(prefix) if prefix else self.root
        paths = [base] if base.is_file() else []
        for folder, _, files in os.walk(base):
            paths += [Path(folder, name) for name in files if not name.startswith(TEMPORARY_PREFIX)]
        infos = [info for path in paths if (info := self._info(path))]
        return sorted(infos, key=lambda info: info.name)

    def stat(self, name: str) -> ObjectInfo | None:
        path = self.path(name)
        return self._info(path) if path.is_file() else None

    def read(self, name: str) -> bytes:
        with os_errors(f"reading {self.uri(name)}"):
            return self.path(name).read_bytes()

    def write(self, name: str, data: bytes) -> None:
        with self._durable(name, io.BytesIO(data)) as temporary:
            os.replace(temporary, self.path(name))

    def create(self, name: str, data: bytes) -> None:
        with self._durable(name, io.BytesIO(data)) as temporary:
            try:
                os.link(temporary, self.path(name))
            except FileExistsError as error:
                raise AlreadyExistsError(self.uri(name)) from error

    def replace(self, name: str, data: bytes, expected_version: str) -> None:
        if not expected_version:
            try:
                return self.create(name, data)
            except AlreadyExistsError as error:
                raise VersionConflictError(self.uri(name)) from error
        path = self.path(name)
        with os_errors(f"writing {path}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path.parent / f"{TEMPORARY_PREFIX}lock-{path.name}", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                info = self.stat(name)
                if info is None or info.version != expected_version:
                    raise VersionConflictError(self.uri(name))
                self.write(name, data)

    def delete(self, name: str) -> None:
        with os_errors(f"deleting {self.uri(name)}"):
            self.path(name).unlink(missing_ok=True)

    def delete_folder(self, prefix: str) -> None:
        with os_errors(f"deleting {self.uri(prefix)}"), contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.path(prefix))

    def upload(self, path: Path, name: str, *, crc32c: int | None = None) -> None:
        with os_errors(f"reading {path}"):
            source = path.open("rb")
        with source, self._durable(name, source, crc32c) as temporary:
            os.replace(temporary, self.path(name))

    def copy(self, name: str, new_name: str) -> None:
        source, target = self.fetch(name), self.path(new_name)
        with os_errors(f"writing {target}"):
            target.parent.mkdir(parents=True, exist_ok=True)
            temporary = target.parent / f"{TEMPORARY_PREFIX}link-{uuid.uuid4().hex}"
            try:
                os.link(source, temporary)
                os.replace(temporary, target)  # which does nothing where both are one file already
                _fsync_folder(target.parent)
            finally:
                temporary.unlink(missing_ok=True)

    def fetch(self, name: str) -> Path:
        """The object itself, so callers must not change it."""
        path = self.path(name)
        if not path.is_file():
            raise UserError(f"no such file: {path}", code=ExitCode.CONFIG)
        return path

    def download(self, name: str, path: Path) -> None:
        source = self.fetch(name)
        with os_errors(f"writing {path}"):
            shutil.copyfile(source, path)

    @contextlib.contextmanager
    def _durable(self, name: str, source: IO[bytes], crc32c: int | None = None) -> Iterator[str]:
        """A temporary file with the bytes of `source`, on the disk, beside its target; the block puts it in place."""
        target = self.path(name)
        with os_errors(f"writing {target}"):
            target.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(prefix=TEMPORARY_PREFIX, dir=target.parent)
            try:
                with os.fdopen(handle, "wb") as sink:
                    checksum = _copy(source, sink)
                    if crc32c not in (None, checksum):
                        raise changed_before_upload(target)
                    sink.flush()
                    os.chmod(temporary, 0o644)  # mkstemp gives 0600: other users could not read the run's output
                    # The version is made of this time. The kernel's own is only as fine as its tick.
                    os.utime(temporary, ns=(time.time_ns(), time.time_ns()))
                    os.fsync(sink.fileno())
                yield temporary
                _fsync_folder(target.parent)
            finally:
                Path(temporary).unlink(missing_ok=True)

    def _info(self, path: Path) -> ObjectInfo | None:
        try:
            stat = path.stat()
        except FileNotFoundError:  # deleted since it was listed
            return None
        name = path.relative_to(self.root).as_posix()
        return ObjectInfo(name, stat.st_size, f"{stat.st_mtime_ns}-{stat.st_ino}")


def changed_before_upload(target: object) -> CorruptObjectError:
    """The error of an upload whose bytes are not those that its caller vouched for."""
    return CorruptObjectError(f"bytes changed before they reached {target}: on the disk or on the way")


def _copy(source: IO[bytes], sink: IO[bytes]) -> int:
    """Copy to the end; the CRC32C of what was copied."""
    checksum = 0
    while chunk := source.read(CHUNK_BYTES):
        checksum = google_crc32c.extend(checksum, chunk)
        sink.write(chunk)
    return int(checksum)


def _fsync_folder(folder: Path) -> None:
    """Make a rename or link durable: the folder's own entry must reach the disk too."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def open_storage(root_uri: str) -> Storage:
    """The store behind a local path, a `file://` path or `gs://bucket/path`. Raises ConfigError for another scheme."""
    if root_uri.startswith("gs://"):
        from trainer.storage.gcs import GcsStorage

        return GcsStorage(root_uri)
    if "://" in root_uri and not root_uri.startswith("file://"):
        raise ConfigError(f"storage {root_uri!r} has an unknown scheme", expected="a local path or gs://bucket/path")
    return LocalStorage(root_uri.removeprefix("file://"))
