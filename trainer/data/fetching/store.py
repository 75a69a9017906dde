"""The store of downloaded images: one object for each address, named by the address and by what was downloaded.

The name has size and checksum, so that an image is identified without reading it and verified when it is read. An
address that can never be downloaded has an object with the reason; delete it and the address is asked again.
"""

from __future__ import annotations

import hashlib
import re
import sqlite3
import threading
from contextlib import suppress
from functools import partial

from vlmpipe.trainer.data.fetching.web_address import without_query
from vlmpipe.trainer.data.media import FRAGMENT
from vlmpipe.trainer.data.rejects import RejectCode, RejectedError
from vlmpipe.trainer.data.sample import ImageRef, content_of
from vlmpipe.trainer.data.sqlite_table import disk_table
from vlmpipe.trainer.errors import DataError
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.base import AlreadyExistsError

IMAGES, FAILED = "images", "failed"
NAME = re.compile(rf"{IMAGES}/\w\w/(\w{{40}})-(\d+)-(\d+)")
WEB = "web:"  # begins the name of an ImageRef
MAX_REASON_BYTES = 1 << 10


def key_of(address: str) -> str:
    """Name of an address in the store. Fragments name no other file."""
    return hashlib.sha256(address.partition("#")[0].encode("utf-8", "surrogatepass")).hexdigest()[:40]


class FetchedImages:
    """Images of the web by their addresses. Safe to use from several threads."""

    def __init__(self, uri: str, max_image_bytes: int) -> None:
        """`uri`: "" where nothing was fetched yet, and images are only named."""
        self._storage = open_storage(uri) if uri else None
        self._max_bytes = max_image_bytes
        self._lock = threading.Lock()
        self._table: sqlite3.Connection | None = None

    def reference(self, address: str) -> ImageRef:
        """The image at the address. Raises RejectedError where it can never be downloaded."""
        if FRAGMENT.fullmatch(address):
            message = f"{without_query(address)}: pages and frames of files of the web are not read"
            raise RejectedError(RejectCode.REF_MISSING, message)
        key = key_of(address)
        if reason := self.failure(key):
            raise RejectedError(RejectCode.REF_MISSING, f"{without_query(address)} was not fetched: {reason}")
        suffix = without_query(address).rpartition("/")[2].rpartition(".")[2].lower()
        return ImageRef(
            f"{WEB}{key}.{suffix}",
            partial(self._read, key, address),
            partial(self._known, key, address),
            partial(self._size, key),
            is_file=True,
            address=address,
        )

    def holds(self, key: str) -> bool:
        return self._object(key) is not None

    def failure(self, key: str) -> str:
        """Why the address can never be downloaded; "" where that is not known."""
        with self._lock:
            row = self._listed().execute("SELECT reason FROM failed WHERE key = ?", (key,)).fetchone()
        if row is None or self._storage is None:
            return ""
        return str(row[0]) or self._storage.read(f"{FAILED}/{key}", MAX_REASON_BYTES).decode("utf-8", "replace")

    def add(self, key: str, data: bytes) -> None:
        size, checksum = content_of(data).split()
        assert self._storage is not None
        with suppress(AlreadyExistsError):  # another run has fetched the same
            self._storage.create(f"{IMAGES}/{key[:2]}/{key}-{size}-{checksum}", data)
        with self._lock:
            self._listed().execute("INSERT OR IGNORE INTO images VALUES (?, ?, ?)", (key, int(size), int(checksum)))

    def add_failure(self, key: str, reason: str) -> None:
        """Note that the address can never be downloaded."""
        assert self._storage is not None
        with suppress(AlreadyExistsError):
            self._storage.create(f"{FAILED}/{key}", reason.encode()[:MAX_REASON_BYTES])
        with self._lock:
            self._listed().execute("INSERT OR IGNORE INTO failed VALUES (?, ?)", (key, reason))

    def content(self, name: str) -> str:
        """Identity of the image of an ImageRef's name."""
        entry = self._object(name.removeprefix(WEB).partition(".")[0])
        return f"{entry[0]} {entry[1]}" if entry else "missing"

    def size_bytes(self, key: str) -> int:
        entry = self._object(key)
        return entry[0] if entry else 0

    def _size(self, key: str) -> int:
        return self.size_bytes(key)

    def _known(self, key: str, address: str) -> str:
        entry = self._object(key)
        if entry is None:
            raise _not_fetched(address)
        return f"{entry[0]} {entry[1]}"

    def _read(self, key: str, address: str) -> bytes:
        entry = self._object(key)
        if entry is None or self._storage is None:
            raise _not_fetched(address)
        size, checksum = entry
        name = f"{IMAGES}/{key[:2]}/{key}-{size}-{checksum}"
        if size > self._max_bytes:
            message = f"{size} bytes, more than data.max_image_bytes {self._max_bytes}"
            raise RejectedError(RejectCode.IMAGE_TOO_LARGE, message)
        data = self._storage.read(name, self._max_bytes)
        if content_of(data) != f"{size} {checksum}":
            raise DataError(
                f"{self._storage.uri(name)} is damaged: it has other bytes than were downloaded",
                expected="an object whose bytes are those of its name",
                fix="delete it and run again, which downloads it again",
            )
        return data

    def _object(self, key: str) -> tuple[int, int] | None:
        """Size and CRC32C."""
        with self._lock:
            entry: tuple[int, int] | None = (
                self._listed().execute("SELECT bytes, crc32c FROM images WHERE key = ?", (key,)).fetchone()
            )
        return entry

    def _listed(self) -> sqlite3.Connection:
        """Tables of the store's objects, from one listing. Hold the lock."""
        if self._table is None:
            self._table = disk_table(
                "CREATE TABLE images (key TEXT PRIMARY KEY, bytes INTEGER, crc32c INTEGER) WITHOUT ROWID; "
                "CREATE TABLE failed (key TEXT PRIMARY KEY, reason TEXT) WITHOUT ROWID"
            )
            for info in self._storage.list() if self._storage else ():
                if match := NAME.fullmatch(info.name):
                    values = (match[1], int(match[2]), int(match[3]))
                    self._table.execute("INSERT OR IGNORE INTO images VALUES (?, ?, ?)", values)
                elif info.name.startswith(f"{FAILED}/"):
                    self._table.execute("INSERT OR IGNORE INTO failed VALUES (?, '')", (info.name[len(FAILED) + 1 :],))
        return self._table


def _not_fetched(address: str) -> RejectedError:
    # Without the reason of this run, by which the digests of chunks would change from run to run.
    message = f"{without_query(address)} is not fetched; fetched.json of a run that asked for it says why"
    return RejectedError(RejectCode.REF_MISSING, message)
