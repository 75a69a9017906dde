"""The Storage protocol: objects under a root, with names like `a/b/c` that cannot leave it.

Run outputs, prepared data, features and checkpoints are read and written through `open_storage(uri)`.
"""

from __future__ import annotations

import os
import re
import stat
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Protocol

import google_crc32c

from vlmpipe.trainer.errors import ConfigError, ExitCode, UserError, os_errors
from vlmpipe.trainer.printable import unsafe_characters
from vlmpipe.trainer.storage.user_folders import expanded

BUCKETS_MOUNT = Path("/gcs")
BUCKET_SCHEMES = ("gs://", "s3://")
# Of addresses that people write with one slash, or none: a path would make a folder of that name.
MISTYPED = re.compile(r"(?i:gs|s3|file|https?|bq|hf):(?!//)")
CHUNK_BYTES = 8 << 20
TEMPORARY_PREFIX = ".tmp-"  # of half-written files and locks, which are not objects


@dataclass(frozen=True)
class ObjectInfo:
    """Metadata of one object.

    `version` changes with every overwrite (a generation on GCS); on S3, where it is the ETag, only with the bytes.
    """

    name: str
    size_bytes: int
    version: str
    crc32c: int | None = None  # kept by the store; None in a folder, and in a list of S3


class AlreadyExistsError(Exception):
    """A create-only write found an object of that name."""


class VersionConflictError(Exception):
    """A compare-and-swap found another version than the one it expected."""


class CorruptObjectError(UserError):
    """An object's bytes do not match the store's checksum (exit 65 unless a caller can fall back)."""

    def __init__(self, problem: str) -> None:
        super().__init__(
            problem,
            expected="bytes that match the CRC32C kept with them",
            fix="delete the object and let the step that wrote it write it again",
            code=ExitCode.DATA,
            passes=True,
        )


class Storage(Protocol):
    """Objects under one root. Writes are atomic: readers see the old or the new object, never part of one.

    Names are normalized by `clean_name`. `read` and `fetch` raise UserError for a missing object, `stat` returns None
    and `delete` does nothing.
    """

    root_uri: str

    def uri(self, name: str) -> str:
        """The full URI of a name."""
        ...

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        """Every object in the folder `prefix` and below it (or the one object of that name), sorted by name."""
        ...

    def folders(self, prefix: str) -> Sequence[str]:
        """Names of the folders directly in the folder `prefix`, sorted; what is in them is not listed.

        Servers of S3's API that store objects as files (SeaweedFS is one) also name folders whose objects are deleted.
        """
        ...

    def stat(self, name: str) -> ObjectInfo | None: ...

    def read(self, name: str, max_bytes: int | None = None) -> bytes:
        """Raises FileTooLargeError (exit 65) for more than `max_bytes`, before they are in memory."""
        ...

    def read_range(self, name: str, start: int, end: int, *, version: str = "") -> bytes:
        """Bytes `start` to `end` of an object, or as many of them as it has; nothing is read beside them.

        Raises VersionConflictError for another version than a given one of `list` or `stat`. Not verified, because a
        store keeps the checksum of whole objects only: the caller must have one of these bytes.
        """
        ...

    def write(self, name: str, data: bytes) -> None:
        """Write or overwrite."""
        ...

    def create(self, name: str, data: bytes) -> None:
        """Write only a new object; of several writers exactly one succeeds. Raises AlreadyExistsError."""
        ...

    def replace(self, name: str, data: bytes, expected_version: str) -> None:
        """Overwrite only this version of `stat` ("": no object). Raises VersionConflictError."""
        ...

    def delete(self, name: str) -> None: ...

    def delete_folder(self, prefix: str) -> None:
        """Delete every object in and below the folder. Not atomic."""
        ...

    def upload(self, path: Path, name: str, *, crc32c: int | None = None) -> None:
        """Write or overwrite with a local file of any size.

        Raises CorruptObjectError, and writes nothing, when the bytes differ from a given `crc32c`.
        """
        ...

    def copy(self, name: str, new_name: str) -> None:
        """Copy an object within the store, without downloading it.

        In a folder both names share one file: no space is used, and damage affects both.
        """
        ...

    def copy_to(self, name: str, target: Storage, *, crc32c: int) -> None:
        """Copy an object to another store, under the same name; between buckets without downloading it.

        Raises CorruptObjectError when the object's checksum is another one.
        """
        ...

    def fetch(self, name: str) -> Path:
        """A local file with the object's verified bytes. It may be shared: callers must not change it."""
        ...

    def download(self, name: str, path: Path) -> None:
        """Write the object's verified bytes to a local file. Not atomic."""
        ...


def clean_name(name: str) -> str:
    """`name` normalized to `a/b/c`. Raises ConfigError for one that is empty, cannot be shown or leaves the root."""
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or unsafe_characters(name):
        expected = "a relative path without '..', control characters and marks of direction"
        raise ConfigError(f"unsafe object name {name!r}", expected=expected)
    return "/".join(parts)


def mounted(uri: str) -> Path | None:
    """A URI as a file system path; None for a bucket that is not mounted.

    Vertex AI mounts every bucket of Cloud Storage at /gcs in every container. For TensorBoard, which only appends:
    writes there are not atomic.
    """
    if uri.startswith("gs://") and BUCKETS_MOUNT.is_dir():
        return BUCKETS_MOUNT / uri.removeprefix("gs://")
    return None if in_bucket(uri) else expanded(uri)


def in_bucket(uri: str) -> bool:
    """Return whether this is the address of an object store, which every machine reaches, and no path."""
    return uri.startswith(BUCKET_SCHEMES)


def join_uri(base: str, *parts: str) -> str:
    """`base` and `parts` with exactly one slash between."""
    return "/".join([base.rstrip("/"), *(part.strip("/") for part in parts)])


def cache_folder() -> Path:
    """This machine's folder of copies of remote objects: VLMPIPE_CACHE_DIR, or a temporary folder of this user."""
    chosen = os.environ.get("VLMPIPE_CACHE_DIR")
    # A link that the user chose is followed; one in the temporary folder may be another user's.
    default = Path(tempfile.gettempdir(), f"vlmpipe-cache-{os.getuid()}")
    folder = Path(os.path.realpath(expanded(chosen))) if chosen else default
    with os_errors(f"making the cache folder {folder}"):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        how = "is a link or a file"
    elif status.st_uid != os.getuid():
        how = "belongs to another user"
    elif status.st_mode & stat.S_IWOTH:
        how = f"may be written by every user (mode {stat.S_IMODE(status.st_mode):04o})"
    else:
        return folder
    raise ConfigError(
        f"the cache folder {folder} {how}",
        expected="a folder that only this user writes: what is cached is read without asking the bucket again",
        fix="set VLMPIPE_CACHE_DIR to a folder of your own, or take the right from others: chmod o-w",
    )


def crc32c_of(data: bytes) -> int:
    """CRC32C (Castagnoli), the checksum that Cloud Storage keeps for every object."""
    return int(google_crc32c.value(data))


def crc32c_of_file(path: Path) -> int:
    """CRC32C of a file, read in chunks."""
    checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            checksum = google_crc32c.extend(checksum, chunk)
    return int(checksum)


def changed_before_upload(target: object) -> CorruptObjectError:
    """The error of an upload whose bytes differ from the given checksum."""
    return CorruptObjectError(f"bytes changed before they reached {target}: on the disk or on the way")
