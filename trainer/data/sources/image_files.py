"""Images that records name by a path, pages and frames too, read from one folder and never from outside it."""

from __future__ import annotations

import hashlib
import os
import posixpath
import re
import sqlite3
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath
from urllib.parse import unquote

from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.data.conversations.message_parts import inline_bytes
from vlmpipe.trainer.data.fetching.store import WEB, FetchedImages
from vlmpipe.trainer.data.fetching.web_address import is_web, without_query
from vlmpipe.trainer.data.media import PDF, MediaFiles, Part, part_of
from vlmpipe.trainer.data.pdf_pages import MAX_PAGE_PIXELS
from vlmpipe.trainer.data.rejects import RejectCode, RejectedError
from vlmpipe.trainer.data.sample import IMAGE_SUFFIXES, Clip, ImageRef, content_of
from vlmpipe.trainer.data.sources.file_patterns import fingerprint_of
from vlmpipe.trainer.data.sqlite_table import disk_table
from vlmpipe.trainer.data.video import VIDEOS, Video, VideoLimits
from vlmpipe.trainer.errors import ConfigError, DataError, ExitCode, UserError
from vlmpipe.trainer.printable import unsafe_characters
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.base import ObjectInfo, Storage, clean_name
from vlmpipe.trainer.storage.file_sums import crc32c_in
from vlmpipe.trainer.storage.local import LocalStorage
from vlmpipe.trainer.storage.regular_files import FileTooLargeError, NotRegularFileError, read_regular

# Begins a file's address on this machine (RFC 8089), or a relative path that is written as one: file://images/1.jpg.
FILE = re.compile("file:(//(localhost(?=/))?|(?=/))", re.IGNORECASE)


class ImageFiles:
    """Images in a local folder, or below a prefix of a bucket."""

    def __init__(
        self,
        storage: Storage,
        max_image_bytes: int,
        max_media_bytes: int = 0,
        max_pixels: int = MAX_PAGE_PIXELS,
        web: FetchedImages | None = None,
    ) -> None:
        """`max_pixels`: of a frame or a page of an image file; others are decoded here no further than their header.
        `web`: images of the web, where they are fetched.
        """
        self._storage, self.max_image_bytes, self._web = storage, max_image_bytes, web
        self._media = MediaFiles(
            lambda name: self._read(name, max_media_bytes, "data.max_media_bytes"), VideoLimits(max_pixels)
        )
        self._root = storage.root if isinstance(storage, LocalStorage) else None
        self._listed: sqlite3.Connection | None = None  # size and checksum of each object of a bucket
        self._lock = threading.Lock()
        self._roots: tuple[Path, ...] = ()  # of a local folder: it and the folders that links in it lead to
        self._resolved: dict[str, str] = {}  # folders of absolute paths, and where they are
        self._inside: dict[Path, bool] = {}  # folders, and whether they are in the image folder

    def reference(self, path: str) -> ImageRef:
        """The image at that relative path, or the page or frame that it names. Raises RejectedError when the path could
        leave the folder.
        """
        if self._web and is_web(path):
            return self._web.reference(path)
        if (part := part_of(path)) and not part.is_clip:
            part = replace(part, file=self._name_of(part.file))
            # A file is read once for all its parts, so only the first one counts its bytes.
            size = partial(self._size, part.file if part.frame <= 1 else "")
            image, content = partial(self._media.image, part), partial(self._media.content, part)
            return ImageRef(f"{part.file}#{part.fragment}", image, content, size)
        name = self._name_of(path)
        known, size = partial(self._known, name), partial(self._size, name)
        return ImageRef(name, partial(self._read, name), known, size, is_file=True)

    def named(self, address: str) -> ImageRef:
        """The image at a relative path, at an address in the folder, or in a `data:` address. Raises RejectedError."""
        data = inline_bytes(address, self.max_image_bytes)
        if data is None:
            return self.reference(address)
        require_size(len(data), self.max_image_bytes)
        return ImageRef(hashlib.sha256(data).hexdigest(), lambda: data, size_bytes=lambda: len(data))

    def video_frames(self, path: str, most: int, fps: float) -> list[ImageRef]:
        """At most `most` frames of a video, evenly spread: `fps` a second, or with 0 as many as allowed. Raises
        RejectedError.
        """
        name = self._video_name(path)
        count = max(1, min(most, int(self._media.length(name)[0] * fps))) if fps else most
        return [self.reference(f"{path}#frame={number}/{count}") for number in range(1, count + 1)]

    def video(self, path: str) -> tuple[str, float, int]:
        """Name, seconds and frames of a video. Raises RejectedError."""
        name = self._video_name(path)
        return name, *self._media.length(name)

    def whole_video(self, name: str, fragment: str, read: Callable[[Video], bytes], clip: Clip) -> ImageRef:
        """A video that is one image. fragment: says which frames `read` takes of it."""
        return ImageRef(
            f"{name}#{fragment}",
            partial(self._media.of_video, name, read),
            partial(self._media.content, Part(name, fragment)),
            partial(self._size, name),
            clip,
        )

    def frame_times_s(self, path: str, count: int) -> list[float]:
        """When each of `count` evenly spread frames of a video is shown. Raises RejectedError."""
        duration_s, _ = self._media.length(self._name_of(path))
        return [duration_s * (number + 0.5) / count for number in range(count)]

    def _video_name(self, path: str) -> str:
        if PurePosixPath(path).suffix.lower() not in VIDEOS:
            message = f"video {path!r} does not end in {', '.join(sorted(VIDEOS))}"
            raise RejectedError(RejectCode.RECORD_FORM, message)
        return self._name_of(path)

    def _name_of(self, path: str) -> str:
        """The name of a relative path, of an absolute one in the folder, or of an address in the folder."""
        path = self._straight(self._relative(path))
        if is_web(path):
            message = f"{without_query(path)}: files of the web are not fetched; download them into data.image_folder"
            if PurePosixPath(without_query(path)).suffix.lower() not in {*VIDEOS, PDF}:
                message += ", or set data.fetch: true"
            raise RejectedError(RejectCode.REF_MISSING, message)
        if unsafe := unsafe_characters(path):
            message = f"the name of image {path!r} has characters that show as nothing or reorder it: {unsafe}"
            raise RejectedError(RejectCode.REF_UNSAFE_CHARACTERS, message)
        outside = RejectedError(RejectCode.REF_UNSAFE_PATH, f"image {path!r} is outside {self._storage.root_uri}")
        try:
            name = clean_name(path)
        except UserError as error:
            raise outside from error
        if self._root and not self._is_inside(self._root, self._root / name):
            raise outside
        return name

    def _relative(self, path: str) -> str:
        """The path from the folder, whichever links an absolute one goes through; any other path as it is."""
        if address := FILE.match(path):
            path = path[address.end() :]
            if "%" in path and self._root and not os.path.exists(path):  # most tools write such addresses unquoted
                path = unquote(path)
        inside = path.removeprefix(f"{self._storage.root_uri.rstrip('/')}/")
        if self._root is None or not inside.startswith("/") or unsafe_characters(inside):
            return inside
        parent, name = os.path.split(path)
        if parent not in self._resolved:
            self._resolved[parent] = os.path.realpath(parent)
        return f"{self._resolved[parent]}/{name}".removeprefix(f"{self._root}/")

    def _straight(self, path: str) -> str:
        """The path without `..`; as it is where that would lead elsewhere, which is up from a link's target."""
        if ".." not in path.split("/") or unsafe_characters(path):
            return path
        straight = posixpath.normpath(path)
        is_same = self._root is None or os.path.realpath(self._root / path) == os.path.realpath(self._root / straight)
        return straight if is_same else path

    def _is_inside(self, root: Path, path: Path) -> bool:
        """Return whether links lead no further than the folder. Each parent is resolved once, not in each pass."""
        # Unlike Path.resolve, realpath accepts a loop of links; opening it then fails.
        parent = path.parent
        if not self._roots:
            self._roots = (root, *linked_folders(root))
        if parent not in self._inside:
            self._inside[parent] = any(map(Path(os.path.realpath(parent)).is_relative_to, self._roots))
        if not os.path.islink(path):
            return self._inside[parent]
        return any(map(Path(os.path.realpath(path)).is_relative_to, self._roots))

    def fingerprint(self, names: Iterable[str]) -> str:
        """Changes when one of these images does; in a bucket, where asking for each is slow, when any of the folder."""
        if self._root is None and self._web is None:
            return fingerprint_of(self._storage.list())
        digest = hashlib.sha256()
        if self._root is None:
            digest.update(fingerprint_of(self._storage.list()).encode())
        for name in names:
            if self._web and name.startswith(WEB):
                digest.update(f"{name} {self._web.content(name)}\n".encode())
                continue
            if self._root is None:
                continue
            name = part.file if (part := part_of(name)) else name
            try:
                stat = os.stat(self._root / name)
                digest.update(f"{name} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}\n".encode())
            except OSError:
                digest.update(f"{name} missing\n".encode())
        return digest.hexdigest()

    def _known(self, name: str) -> str:
        """Size and CRC32C, so that an image gets the same split from a folder and from a bucket."""
        if self._root:
            return content_of(self._read(name))
        info = self._object(name)
        if not info:
            return f"no {self._storage.uri(name)}"
        checksum = crc32c_in(self._storage, ObjectInfo(name, info[0], "", info[1]))
        return content_of(self._read(name)) if checksum is None else f"{info[0]} {checksum}"

    def _size(self, name: str) -> int:
        if self._root:
            with suppress(OSError):  # reported when the image is read
                return (self._root / name).stat().st_size
            return 0
        info = self._object(name)
        return info[0] if info else 0

    def _object(self, name: str) -> tuple[int, int | None] | None:
        """Size and checksum of an object, from one listing of the whole bucket folder."""
        with self._lock:
            if self._listed is None:
                columns = "name TEXT PRIMARY KEY, bytes INTEGER, crc32c INTEGER"
                self._listed = disk_table(f"CREATE TABLE known ({columns}) WITHOUT ROWID")
                rows = ((info.name, info.size_bytes, info.crc32c) for info in self._storage.list())
                self._listed.executemany("INSERT INTO known VALUES (?, ?, ?)", rows)
            listed: tuple[int, int | None] | None = self._listed.execute(
                "SELECT bytes, crc32c FROM known WHERE name = ?", (name,)
            ).fetchone()
            return listed

    def _read(self, name: str, max_bytes: int = 0, limit: str = "data.max_image_bytes") -> bytes:
        max_bytes = max_bytes or self.max_image_bytes
        try:
            if self._root:
                return read_regular(self._root / name, max_bytes)
            return self._storage.read(name, max_bytes)
        except FileTooLargeError as error:
            raise _too_large(error.size_bytes, max_bytes, limit) from error
        except OSError as error:
            raise RejectedError(RejectCode.REF_MISSING, f"{self._storage.uri(name)}: {error.strerror}") from error
        except UserError as error:
            # Any other error is the bucket's and not this sample's.
            if error.code != ExitCode.CONFIG and not isinstance(error, NotRegularFileError):
                raise
            raise RejectedError(RejectCode.REF_MISSING, error.found) from error


def open_image_files(config: DataConfig, image_folder: str, beside: Storage) -> ImageFiles:
    """The images in `data.image_folder`, or without one, those beside the file that names them.

    Raises ConfigError or DataError when `image_folder` does not exist or holds no images.
    """
    web = FetchedImages(config.fetched_folder, config.max_image_bytes) if config.fetch else None
    limits = (config.max_image_bytes, config.max_media_bytes, config.max_image_pixels, web)
    if not image_folder:
        return ImageFiles(beside, *limits)
    storage = open_storage(image_folder)
    if isinstance(storage, LocalStorage):
        _require_images(image_folder, storage.root)
    return ImageFiles(storage, *limits)


def _require_images(image_folder: str, folder: Path) -> None:
    if not folder.is_dir():
        raise ConfigError(
            f"data.image_folder {image_folder!r} is not a folder (looked for {folder})",
            expected="the folder that the image paths in the records are relative to",
        )
    names = (name for root in (folder, *linked_folders(folder)) for _, _, files in os.walk(root) for name in files)
    if not any(PurePosixPath(name).suffix.lower() in {*IMAGE_SUFFIXES, *VIDEOS, PDF} for name in names):
        raise DataError(
            f"data.image_folder {image_folder!r} holds no images (looked in {folder} and below)",
            expected="files that end in " + ", ".join(sorted(IMAGE_SUFFIXES)),
        )


def linked_folders(folder: Path) -> list[Path]:
    """Where links lead that are directly in an image folder and lead to folders, as LLaVA's guide makes them."""
    try:
        links = [path for path in folder.iterdir() if path.is_symlink() and path.is_dir()]
    except OSError:  # reported when an image is read
        return []
    return [Path(os.path.realpath(path)) for path in links]


def require_size(size_bytes: int, max_image_bytes: int) -> None:
    """Raise RejectedError for an encoded image with more bytes than allowed. Call it before reading the image."""
    if size_bytes > max_image_bytes:
        raise _too_large(size_bytes, max_image_bytes, "data.max_image_bytes")


def _too_large(size_bytes: int, max_bytes: int, limit: str) -> RejectedError:
    message = f"{size_bytes} bytes, more than {limit} {max_bytes}"
    return RejectedError(RejectCode.IMAGE_TOO_LARGE, message)
