"""Storage in a local folder."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import google_crc32c

from vlmpipe.trainer.errors import ConfigError, ExitCode, UserError, os_errors
from vlmpipe.trainer.storage.base import (
    CHUNK_BYTES,
    TEMPORARY_PREFIX,
    AlreadyExistsError,
    ObjectInfo,
    Storage,
    VersionConflictError,
    changed_before_upload,
    clean_name,
)
from vlmpipe.trainer.storage.file_systems import (
    change_after,
    exclusively,
    link_or_copy,
    move_if_absent,
    set_time,
    sync,
    sync_folder,
)
from vlmpipe.trainer.storage.regular_files import open_regular, read_regular
from vlmpipe.trainer.storage.user_folders import expanded


class LocalStorage:
    """A folder. Writes go to a temporary file, fsync and rename; create-only ones link, which fails if the name exists.

    File systems without one of these are written too: see `file_systems`.

    `replace` is atomic against other `replace` calls and against `create`, not against a plain `write`.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(os.path.realpath(expanded(root)))  # unlike resolve, accepts a loop of links
        self.root_uri = str(self.root)

    def uri(self, name: str) -> str:
        return str(self.root / clean_name(name))

    def path(self, name: str) -> Path:
        """The path of a name, for writing. Raises ConfigError when a link in its folder leads out of the root.

        The last part may itself be a link, which writing and deleting replace.
        """
        return self._inside(name, follow=False)

    def _inside(self, name: str, *, follow: bool) -> Path:
        """The path of a name. With `follow`, a link at its end must stay inside the root, too."""
        path = self.root / clean_name(name)
        real = os.path.realpath(path if follow else path.parent)
        if not Path(real).is_relative_to(self.root):
            raise ConfigError(
                f"{self.uri(name)} is reached through a link to {real}, outside of {self.root}",
                expected="a file below the folder itself",
                fix="put the file where the link is, or name the folder that the link leads to",
            )
        return path

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        base = self.path(prefix) if prefix else self.root
        paths = [base] if base.is_file() else []
        for folder, _, files in os.walk(base, onerror=_raise_unless_absent):
            paths += [Path(folder, name) for name in files if not name.startswith(TEMPORARY_PREFIX)]
        infos = [info for path in paths if (info := self._info(path))]
        return sorted(infos, key=lambda info: info.name)

    def folders(self, prefix: str) -> Sequence[str]:
        base = self.path(prefix)
        with os_errors(f"listing {base}"):
            folders = [path for path in base.iterdir() if path.is_dir()] if base.is_dir() else []
        # As in a bucket, there is no folder without a file.
        return sorted(path.name for path in folders if any(files for _, _, files in os.walk(path)))

    def stat(self, name: str) -> ObjectInfo | None:
        path = self.path(name)
        return self._info(path) if path.is_file() else None

    def read(self, name: str, max_bytes: int | None = None) -> bytes:
        path = self._inside(name, follow=True)
        with os_errors(f"reading {path}"):
            if max_bytes is not None:
                return read_regular(path, max_bytes)
            with open_regular(path) as file:
                return file.read()

    def read_range(self, name: str, start: int, end: int, *, version: str = "") -> bytes:
        path = self._inside(name, follow=True)
        if version and ((info := self.stat(name)) is None or info.version != version):
            raise VersionConflictError(self.uri(name))
        with os_errors(f"reading {path}"), open_regular(path) as file:
            file.seek(start)
            return file.read(end - start)

    def write(self, name: str, data: bytes) -> None:
        with self._durable(name, io.BytesIO(data)) as temporary:
            os.replace(temporary, self.path(name))

    def create(self, name: str, data: bytes) -> None:
        with self._durable(name, io.BytesIO(data)) as temporary:
            try:
                move_if_absent(temporary, self.path(name))
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
            with exclusively(path):
                info = self.stat(name)
                if info is None or info.version != expected_version:
                    raise VersionConflictError(self.uri(name))
                after_ns = path.stat().st_mtime_ns  # a version never comes back
                with self._durable(name, io.BytesIO(data), after_ns=after_ns) as temporary:
                    os.replace(temporary, path)

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
                link_or_copy(source, temporary)
                os.replace(temporary, target)  # no effect where both are already one file
                sync_folder(target.parent)
            finally:
                temporary.unlink(missing_ok=True)

    def copy_to(self, name: str, target: Storage, *, crc32c: int) -> None:
        target.upload(self.fetch(name), name, crc32c=crc32c)

    def fetch(self, name: str) -> Path:
        """The object itself, so callers must not change it."""
        path = self._inside(name, follow=True)
        if not path.is_file():
            raise UserError(f"no such file: {path}", code=ExitCode.CONFIG)
        return path

    def download(self, name: str, path: Path) -> None:
        source = self.fetch(name)
        with os_errors(f"writing {path}"):
            shutil.copyfile(source, path)

    @contextlib.contextmanager
    def _durable(self, name: str, source: IO[bytes], crc32c: int | None = None, *, after_ns: int = 0) -> Iterator[str]:
        """A synced temporary file with the bytes of `source` beside its target; the block moves it there.

        after_ns: what its time of change is later than.
        """
        target = self.path(name)
        with os_errors(f"writing {target}"):
            target.parent.mkdir(parents=True, exist_ok=True)
            temporary = str(target.parent / f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}")
            # With the permissions of the user's umask: with mkstemp other users could not read the run's output.
            handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                with os.fdopen(handle, "wb") as sink:
                    checksum = _copy(source, sink)
                    if crc32c not in (None, checksum):
                        raise changed_before_upload(target)
                    sink.flush()
                    # The version contains this time; the kernel's own has only the resolution of its tick.
                    set_time(temporary, max(time.time_ns(), after_ns + 1))
                    change_after(sink.fileno(), after_ns)
                    sync(sink.fileno())
                yield temporary
                sync_folder(target.parent)
            finally:
                Path(temporary).unlink(missing_ok=True)

    def _info(self, path: Path) -> ObjectInfo | None:
        """For a broken link, the link's own metadata: leaving it out would hide a missing file."""
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
    """Copy everything; returns the CRC32C."""
    checksum = 0
    while chunk := source.read(CHUNK_BYTES):
        checksum = google_crc32c.extend(checksum, chunk)
        sink.write(chunk)
    return int(checksum)


def _raise_unless_absent(error: OSError) -> None:
    """Raise unless the file is absent: a run with unreadable checkpoints must not start from the beginning."""
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        with os_errors(f"listing {error.filename}"):
            raise error
