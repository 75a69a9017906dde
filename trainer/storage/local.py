"""Storage in a local folder."""

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
from pathlib import Path
from typing import IO

import google_crc32c

from trainer.errors import ConfigError, ExitCode, UserError, os_errors
from trainer.storage.base import (
    CHUNK_BYTES,
    TEMPORARY_PREFIX,
    AlreadyExistsError,
    ObjectInfo,
    VersionConflictError,
    changed_before_upload,
    clean_name,
)
from trainer.storage.regular_files import open_lock, open_regular, read_regular


class LocalStorage:
    """A folder. Atomic by write-to-temporary, fsync and rename; create-only by link, which fails if the name exists.

    `replace` is atomic against other `replace` calls and against `create`, not against a plain `write`.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(os.path.realpath(Path(root).expanduser()))  # which takes a loop of links as it is
        self.root_uri = str(self.root)

    def uri(self, name: str) -> str:
        return str(self.root / clean_name(name))

    def path(self, name: str) -> Path:
        """The file behind a name. Raises ConfigError for a name that would leave the root, also through a link.

        The last part may itself be a link: writing and deleting replace the link, reading follows it inside the root.
        """
        path = self.root / clean_name(name)
        self._require_inside(path.parent, name)
        return path

    def _existing(self, name: str) -> Path:
        """The file behind a name, to be read."""
        path = self.root / clean_name(name)
        self._require_inside(path, name)
        return path

    def _require_inside(self, path: Path, name: str) -> None:
        real = os.path.realpath(path)
        if not Path(real).is_relative_to(self.root):
            raise ConfigError(
                f"{self.uri(name)} is reached through a link to {real}, outside of {self.root}",
                expected="a file below the folder itself",
                fix="put the file where the link is, or name the folder that the link leads to",
            )

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

    def read(self, name: str, max_bytes: int | None = None) -> bytes:
        path = self._existing(name)
        with os_errors(f"reading {path}"):
            if max_bytes is not None:
                return read_regular(path, max_bytes)
            with open_regular(path) as file:
                return file.read()

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
            # Others of the group may share the folder, and must be able to lock.
            with os.fdopen(open_lock(path.parent / f"{TEMPORARY_PREFIX}lock-{path.name}", 0o666), "w") as lock:
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
            source = open_regular(path)
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
        path = self._existing(name)
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
        """Of a link that leads nowhere, the link's own: to leave it out would make a folder smaller in silence."""
        try:
            try:
                stat = path.stat()
            except OSError:
                stat = path.lstat()
        except FileNotFoundError:  # deleted since it was listed
            return None
        name = path.relative_to(self.root).as_posix()
        return ObjectInfo(name, stat.st_size, f"{stat.st_mtime_ns}-{stat.st_ino}")


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
