"""Pictures that records name by a path: read from one folder, and never from outside it."""

from __future__ import annotations

import hashlib
import os
import sqlite3
import threading
from collections.abc import Iterable
from functools import partial
from pathlib import Path, PurePosixPath

from trainer.data.rejects import RejectCode, RejectedError
from trainer.data.sample import IMAGE_SUFFIXES, ImageRef, content_of
from trainer.data.sources.file_patterns import fingerprint_of
from trainer.data.sqlite_table import disk_table
from trainer.errors import ConfigError, DataError, ExitCode, UserError
from trainer.storage import open_storage
from trainer.storage.base import Storage, clean_name
from trainer.storage.local import LocalStorage
from trainer.storage.regular_files import FileTooLargeError, NotRegularFileError, read_regular


class ImageFiles:
    """A local folder or gs:// prefix of pictures."""

    def __init__(self, storage: Storage, max_image_bytes: int) -> None:
        self._storage, self.max_image_bytes = storage, max_image_bytes
        self._root = storage.root if isinstance(storage, LocalStorage) else None
        self._listed: sqlite3.Connection | None = None  # what a bucket knows of its pictures
        self._lock = threading.Lock()

    def reference(self, path: str) -> ImageRef:
        """The picture of that relative path. Raises RejectedError when the path could leave the folder."""
        outside = RejectedError(RejectCode.REF_UNSAFE_PATH, f"image {path!r} is outside {self._storage.root_uri}")
        try:
            name = clean_name(path)
        except UserError as error:
            raise outside from error
        if self._root:
            target = Path(self._root, name)
            # Unlike Path.resolve, this takes a loop of links as it is; to open it is the error.
            if not Path(os.path.realpath(target)).is_relative_to(self._root):
                raise outside
            return ImageRef(
                name,
                partial(_read_local, target, self.max_image_bytes),
                partial(_local_content, target, self.max_image_bytes),
                partial(_size, target),
            )
        return ImageRef(name, partial(self._read_object, name), partial(self._known, name), partial(self._size, name))

    def fingerprint(self, names: Iterable[str]) -> str:
        """Changes when one of these pictures does. In a bucket, when any picture of the folder does.

        A folder is asked about each name, a bucket, for which each question would be a request, for its list.
        """
        if self._root is None:
            return fingerprint_of(self._storage.list())
        digest = hashlib.sha256()
        for name in names:
            digest.update(_file_state(self._root, name).encode())
        return digest.hexdigest()

    def _known(self, name: str) -> str:
        found = self._object(name)
        return f"{found[0]} {found[1]}" if found else f"no {self._storage.uri(name)}"

    def _size(self, name: str) -> int:
        found = self._object(name)
        return found[0] if found else 0

    def _object(self, name: str) -> tuple[int, int | None] | None:
        """A bucket tells size and checksum of all pictures in one list: none has to be fetched for them."""
        with self._lock:
            if self._listed is None:
                columns = "name TEXT PRIMARY KEY, bytes INTEGER, crc32c INTEGER"
                self._listed = disk_table(f"CREATE TABLE known ({columns}) WITHOUT ROWID")
                rows = ((info.name, info.size_bytes, info.crc32c) for info in self._storage.list())
                self._listed.executemany("INSERT INTO known VALUES (?, ?, ?)", rows)
            found: tuple[int, int | None] | None = self._listed.execute(
                "SELECT bytes, crc32c FROM known WHERE name = ?", (name,)
            ).fetchone()
            return found

    def _read_object(self, name: str) -> bytes:
        try:
            return self._storage.read(name, self.max_image_bytes)
        except FileTooLargeError as error:
            raise RejectedError(RejectCode.IMAGE_TOO_LARGE, _too_large(error.size_bytes, error.max_bytes)) from error
        except UserError as error:
            if error.code != ExitCode.CONFIG:  # the bucket does not answer: no fault of this sample
                raise
            raise RejectedError(RejectCode.REF_MISSING, error.found) from error


def open_image_files(image_folder: str, beside: Storage, max_image_bytes: int) -> ImageFiles:
    """The pictures in `data.image_folder`, or without one, those beside the file that names them.

    A folder that is named must exist and hold pictures. Raises ConfigError or DataError.
    """
    if not image_folder:
        return ImageFiles(beside, max_image_bytes)
    storage = open_storage(image_folder)
    if isinstance(storage, LocalStorage):
        _require_pictures(image_folder, storage.root)
    return ImageFiles(storage, max_image_bytes)


def _require_pictures(image_folder: str, folder: Path) -> None:
    if not folder.is_dir():
        raise ConfigError(
            f"data.image_folder {image_folder!r} is not a folder (looked for {folder})",
            expected="the folder that the image paths in the records are relative to",
        )
    names = (name for _, _, files in os.walk(folder) for name in files)
    if not any(PurePosixPath(name).suffix.lower() in IMAGE_SUFFIXES for name in names):
        raise DataError(
            f"data.image_folder {image_folder!r} holds no images (looked in {folder} and below)",
            expected="files that end in " + ", ".join(sorted(IMAGE_SUFFIXES)),
        )


def require_size(size_bytes: int, max_image_bytes: int) -> None:
    """Raise RejectedError for an encoded image with more bytes than allowed. To be asked before they are read."""
    if size_bytes > max_image_bytes:
        raise RejectedError(RejectCode.IMAGE_TOO_LARGE, _too_large(size_bytes, max_image_bytes))


def _too_large(size_bytes: int, max_image_bytes: int) -> str:
    return f"{size_bytes} bytes, more than data.max_image_bytes {max_image_bytes}"


def _read_local(path: Path, max_image_bytes: int) -> bytes:
    try:
        return read_regular(path, max_image_bytes)
    except FileTooLargeError as error:
        raise RejectedError(RejectCode.IMAGE_TOO_LARGE, _too_large(error.size_bytes, max_image_bytes)) from error
    except NotRegularFileError as error:
        raise RejectedError(RejectCode.REF_MISSING, error.found) from error
    except OSError as error:
        raise RejectedError(RejectCode.REF_MISSING, f"{path}: {error.strerror}") from error


def _local_content(path: Path, max_image_bytes: int) -> str:
    return content_of(_read_local(path, max_image_bytes))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # said when it is read
        return 0


def _file_state(root: Path, name: str) -> str:
    try:
        stat = os.stat(root / name)
    except OSError:
        return f"{name} missing\n"
    return f"{name} {stat.st_size} {stat.st_mtime_ns}\n"
