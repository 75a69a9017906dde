"""Common code of object stores under the Storage protocol: names, verified downloads, and this machine's cache."""

from __future__ import annotations

import fcntl
import io
import os
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO, ClassVar

import google_crc32c

from vlmpipe.trainer.errors import ConfigError, ExitCode, UserError, os_errors
from vlmpipe.trainer.storage.base import (
    TEMPORARY_PREFIX,
    CorruptObjectError,
    ObjectInfo,
    Storage,
    cache_folder,
    clean_name,
    crc32c_of,
    crc32c_of_file,
)
from vlmpipe.trainer.storage.file_sums import FileSum
from vlmpipe.trainer.storage.regular_files import FileTooLargeError, open_lock, open_regular
from vlmpipe.trainer.storage.transfer import DELETING, in_parallel

TRANSFER_ATTEMPTS = 3  # for a body that arrived corrupted; anything else is retried by the store's library
NONCE_KEY = "vlmpipe-write"  # of an object's metadata; see decision 6


class RequestCounts:
    """Requests of this process to object stores since it began, by the class in which they are billed.

    Class A: writes, copies and lists; of S3 PUT, COPY, POST and LIST. Class B: all other reads; of S3 GET and HEAD.
    Deletions cost nothing and are not counted.

    Sources: https://cloud.google.com/storage/pricing#operations-by-class, https://aws.amazon.com/s3/pricing/
    """

    def __init__(self) -> None:
        self.class_a = self.class_b = 0
        self._lock = threading.Lock()

    def add(self, *, class_a: int = 0, class_b: int = 0) -> None:
        with self._lock:
            self.class_a += class_a
            self.class_b += class_b


REQUESTS = RequestCounts()


class BucketStorage:
    """Objects under `<scheme><bucket>/<path>`. Safe to use from several threads.

    `fetch` keeps files under VLMPIPE_CACHE_DIR (else the system's temporary folder), by service, bucket and object.
    """

    scheme: ClassVar[str]
    product: ClassVar[str]

    def __init__(self, root_uri: str) -> None:
        self.bucket_name, _, prefix = root_uri.removeprefix(self.scheme).partition("/")
        if not root_uri.startswith(self.scheme) or not self.bucket_name:
            raise ConfigError(f"{root_uri!r} is not a {self.product} URI", expected=f"{self.scheme}bucket/path")
        self._prefix = clean_name(prefix) + "/" if prefix.strip("/") else ""
        self.root_uri = f"{self.scheme}{self.bucket_name}/{self._prefix}".rstrip("/")

    def uri(self, name: str) -> str:
        return f"{self.scheme}{self.bucket_name}/{self._key(name)}"

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        # Names that end with a slash are folder markers of consoles.
        infos = [info for info in self._listed(prefix) if info.name and not info.name.endswith("/")]
        if prefix and not infos and (single := self.stat(prefix)):
            return [single]
        return sorted(infos, key=lambda info: info.name)

    def read(self, name: str, max_bytes: int | None = None) -> bytes:
        sink = io.BytesIO()
        self._download(name, sink, max_bytes)
        return sink.getvalue()

    def write(self, name: str, data: bytes) -> None:
        self._put(name, io.BytesIO(data), len(data), crc32c_of(data))

    def delete_folder(self, prefix: str) -> None:
        for _ in in_parallel(self.delete, [info.name for info in self.list(prefix)], threads=DELETING):
            pass

    def upload(self, path: Path, name: str, *, crc32c: int | None = None) -> None:
        with os_errors(f"reading {path}"):
            checksum = crc32c_of_file(path) if crc32c is None else crc32c
            with open_regular(path) as source:
                self._put(name, source, os.fstat(source.fileno()).st_size, checksum)

    def fetch(self, name: str) -> Path:
        """The object in the cache folder, downloaded unless the file there has the object's size and CRC32C."""
        info = self.stat(name)
        if info is None:
            raise no_such_object(self.uri(name))
        target = cache_folder() / self.scheme.partition(":")[0] / self.bucket_name / self._key(name)
        with os_errors(f"writing {target}"):
            target.parent.mkdir(parents=True, exist_ok=True)
            # Processes of one machine fetch the same shards: one downloads, the others wait.
            with os.fdopen(
                open_lock(target.parent / f"{TEMPORARY_PREFIX}lock-{target.name}"), "w", encoding="utf-8"
            ) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                is_cached = target.is_file() and info.crc32c is not None and _has(target, info)
                if not is_cached:
                    self._download_file(name, target)
        return target

    def download(self, name: str, path: Path) -> None:
        with os_errors(f"writing {path}"), path.open("wb") as sink:
            self._download(name, sink)

    def _pass_on(self, name: str, target: Storage, new_name: str, crc32c: int | None) -> None:
        """Copy an object through this machine's disk, and leave nothing there."""
        with tempfile.TemporaryDirectory(prefix="vlmpipe-copy-") as folder:
            self.download(name, Path(folder, "object"))
            target.upload(Path(folder, "object"), new_name, crc32c=crc32c)

    def folders(self, prefix: str) -> Sequence[str]:
        raise NotImplementedError

    def stat(self, name: str) -> ObjectInfo | None:
        raise NotImplementedError

    def delete(self, name: str) -> None:
        raise NotImplementedError

    def _listed(self, prefix: str) -> Sequence[ObjectInfo]:
        """Every object in the folder and below it."""
        raise NotImplementedError

    def _put(self, name: str, source: IO[bytes], size_bytes: int, checksum: int) -> None:
        """Write or overwrite. Raises CorruptObjectError, and writes nothing, when the bytes have another CRC32C."""
        raise NotImplementedError

    def _transfer(self, name: str, sink: Summed) -> int | None:
        """Write the object's bytes to the sink. Returns the store's CRC32C of them; None if it keeps none."""
        raise NotImplementedError

    def _key(self, name: str) -> str:
        return self._prefix + clean_name(name)

    def _download(self, name: str, sink: IO[bytes], max_bytes: int | None = None) -> None:
        for _ in range(TRANSFER_ATTEMPTS):
            sink.seek(0)
            sink.truncate()
            summed = Summed(sink, self.uri(name), max_bytes)
            if self._transfer(name, summed) in (summed.crc32c, None):
                return
        raise CorruptObjectError(f"{self.uri(name)} arrived corrupted {TRANSFER_ATTEMPTS} times")

    def _download_file(self, name: str, target: Path) -> None:
        handle, temporary = tempfile.mkstemp(prefix=TEMPORARY_PREFIX, dir=target.parent)
        try:
            with os.fdopen(handle, "wb") as sink:
                self._download(name, sink)
            os.replace(temporary, target)
        finally:
            Path(temporary).unlink(missing_ok=True)


class Summed:
    """Keeps size and CRC32C of bytes written to a sink, and refuses more than `max_bytes`."""

    def __init__(self, sink: IO[bytes], uri: str, max_bytes: int | None) -> None:
        self._sink, self._uri, self._max_bytes = sink, uri, max_bytes
        self.crc32c = self.bytes = 0

    def write(self, data: bytes) -> int:
        self.bytes += len(data)
        if self._max_bytes is not None and self.bytes > self._max_bytes:
            raise FileTooLargeError(self._uri, self.bytes, self._max_bytes)
        self.crc32c = int(google_crc32c.extend(self.crc32c, data))
        return self._sink.write(data)


def no_such_object(uri: str) -> UserError:
    """The error of a read of an object that is not there."""
    return UserError(f"no such object: {uri}", code=ExitCode.CONFIG)


def _has(file: Path, info: ObjectInfo) -> bool:
    return file.stat().st_size == info.size_bytes and FileSum.once_a_machine(file).crc32c == info.crc32c
