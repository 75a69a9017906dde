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
from trainer.data.sample import IMAGE_SUFFIXES, ImageRef
from trainer.data.sources.file_patterns import fingerprint_of
from trainer.data.sqlite_table import disk_table
from trainer.errors import ConfigError, DataError, ExitCode, UserError
from trainer.storage import open_storage
from trainer.storage.base import Storage, clean_name, crc32c_of
from trainer.storage.local import LocalStorage


class ImageFiles:
    """A local folder or gs:// prefix of pictures."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
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
            if not target.resolve().is_relative_to(self._root):  # through a link
                raise outside
            return ImageRef(name, partial(_read_local, target), partial(_local_content, target))
        return ImageRef(name, partial(_read_object, self._storage, name), partial(self._known, name))

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
        """A bucket keeps a checksum of each picture and tells all of them in one list: none has to be fetched."""
        with self._lock:
            if self._listed is None:
                self._listed = disk_table("CREATE TABLE known (name TEXT PRIMARY KEY, content TEXT) WITHOUT ROWID")
                rows = ((info.name, f"{info.size_bytes} {info.crc32c}") for info in self._storage.list())
                self._listed.executemany("INSERT INTO known VALUES (?, ?)", rows)
            found = self._listed.execute("SELECT content FROM known WHERE name = ?", (name,)).fetchone()
        return str(found[0]) if found else f"no {self._storage.uri(name)}"


def open_image_files(image_folder: str, beside: Storage) -> ImageFiles:
    """The pictures in `data.image_folder`, or without one, those beside the file that names them.

    A folder that is named must exist and hold pictures. Raises ConfigError or DataError.
    """
    if not image_folder:
        return ImageFiles(beside)
    storage = open_storage(image_folder)
    if isinstance(storage, LocalStorage):
        _require_pictures(image_folder, storage.root)
    return ImageFiles(storage)


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


def _read_local(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RejectedError(RejectCode.REF_MISSING, f"{path}: {error.strerror}") from error


def _local_content(path: Path) -> str:
    """In the form that a bucket knows its pictures by, so that the same picture has the same split from either."""
    data = _read_local(path)
    return f"{len(data)} {crc32c_of(data)}"


def _read_object(storage: Storage, name: str) -> bytes:
    try:
        return storage.read(name)
    except UserError as error:
        if error.code != ExitCode.CONFIG:  # the bucket does not answer: no fault of this sample
            raise
        raise RejectedError(RejectCode.REF_MISSING, error.found) from error


def _file_state(root: Path, name: str) -> str:
    try:
        stat = os.stat(root / name)
    except OSError:
        return f"{name} missing\n"
    return f"{name} {stat.st_size} {stat.st_mtime_ns}\n"
