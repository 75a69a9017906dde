"""Google Cloud Storage behind the Storage protocol.

Every upload carries its CRC32C, so that the server refuses changed bytes; every download is checked against the
server's. Transient failures are retried until a deadline. A retried conditional write whose first answer was lost gets
412 for its own object, which a nonce in the metadata identifies: two writers may write equal bytes.

STORAGE_EMULATOR_HOST points the client at an emulator or test server.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import functools
import io
import os
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import google_crc32c
import requests.exceptions
from google.api_core import exceptions as api
from google.api_core.retry import Retry
from google.auth import exceptions as auth
from google.cloud import storage
from google.cloud.storage.retry import DEFAULT_RETRY

from trainer.errors import ConfigError, ExitCode, UserError, os_errors
from trainer.storage.base import (
    TEMPORARY_PREFIX,
    AlreadyExistsError,
    CorruptObjectError,
    ObjectInfo,
    Storage,
    VersionConflictError,
    cache_folder,
    changed_before_upload,
    clean_name,
    crc32c_of,
    crc32c_of_file,
)
from trainer.storage.file_sums import FileSum
from trainer.storage.regular_files import FileTooLargeError, open_lock, open_regular

# The library's tracing reads each bucket's metadata, which needs a permission that jobs lack.
os.environ.setdefault("DISABLE_GCS_PYTHON_CLIENT_OTEL_BUCKET_METADATA", "true")
TIMEOUT_S = 60.0  # without a byte from the server, after which the request is retried
LONGEST_RETRY_AFTER_S = 60.0
# Memory of one upload, which waits for an answer after each chunk; the library's default is 100 MiB.
UPLOAD_CHUNK_BYTES = 64 << 20
TRANSFER_ATTEMPTS = 3  # for a body that arrived corrupted; anything else is retried by the library
NONCE_KEY = "vlmpipe-write"
# Errors after the library's last retry.
UNANSWERED = (
    api.RetryError,
    api.ServerError,
    api.TooManyRequests,
    auth.TransportError,
    requests.exceptions.RequestException,
)


def _wait_as_asked(error: Exception) -> None:
    """Sleep as the Retry-After of a 429 or 503 asks, which the library ignores.

    Source: https://cloud.google.com/storage/docs/retry-strategy and RFC 9110, 10.2.3 (the form in seconds).
    """
    headers = getattr(getattr(error, "response", None), "headers", None) or {}
    asked = headers.get("Retry-After", "")
    if asked.isdigit():
        time.sleep(min(float(asked), LONGEST_RETRY_AFTER_S))


RETRY = Retry(predicate=DEFAULT_RETRY._predicate, on_error=_wait_as_asked, timeout=180.0)


class GcsStorage:
    """Objects under `gs://bucket/path`. Safe to use from several threads.

    `fetch` keeps files under VLMPIPE_CACHE_DIR (else the system's temporary folder), by bucket and object name.
    """

    def __init__(
        self,
        root_uri: str,
        *,
        client: storage.Client | None = None,
        retry: Retry = RETRY,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        bucket, _, prefix = root_uri.removeprefix("gs://").partition("/")
        if not root_uri.startswith("gs://") or not bucket:
            raise ConfigError(f"{root_uri!r} is not a Cloud Storage URI", expected="gs://bucket/path")
        self._prefix = clean_name(prefix) + "/" if prefix.strip("/") else ""
        self.root_uri = f"gs://{bucket}/{self._prefix}".rstrip("/")
        self._patience: dict[str, Any] = {"retry": retry, "timeout": timeout_s}  # of every request
        with _readable_errors("connecting to", self.root_uri):
            self._bucket = (client or _default_client()).bucket(bucket)

    def uri(self, name: str) -> str:
        return f"gs://{self._bucket.name}/{self._key(name)}"

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        folder = self._key(prefix) + "/" if prefix else self._prefix
        with _readable_errors("listing", f"gs://{self._bucket.name}/{folder}"):
            blobs = self._bucket.list_blobs(
                prefix=folder, fields="items(name,size,generation,crc32c),nextPageToken", **self._patience
            )
            # Names that end with a slash are folder markers of the console.
            infos = [self._info(blob) for blob in blobs if not blob.name.endswith("/")]
        if prefix and not infos and (single := self.stat(prefix)):
            return [single]
        return sorted(infos, key=lambda info: info.name)

    def stat(self, name: str) -> ObjectInfo | None:
        blob = self._lookup(name)
        return self._info(blob) if blob else None

    def read(self, name: str, max_bytes: int | None = None) -> bytes:
        sink = io.BytesIO()
        self._download(name, sink, max_bytes)
        return sink.getvalue()

    def write(self, name: str, data: bytes) -> None:
        self._put(name, io.BytesIO(data), len(data), crc32c_of(data))

    def create(self, name: str, data: bytes) -> None:
        if not self._put_if(name, data, generation=0):
            raise AlreadyExistsError(self.uri(name))

    def replace(self, name: str, data: bytes, expected_version: str) -> None:
        if not self._put_if(name, data, generation=int(expected_version or 0)):
            raise VersionConflictError(self.uri(name))

    def delete(self, name: str) -> None:
        with contextlib.suppress(api.NotFound), _readable_errors("deleting", self.uri(name)):
            self._bucket.blob(self._key(name)).delete(**self._patience)

    def delete_folder(self, prefix: str) -> None:
        for info in self.list(prefix):
            self.delete(info.name)

    def upload(self, path: Path, name: str, *, crc32c: int | None = None) -> None:
        with os_errors(f"reading {path}"):
            checksum = crc32c_of_file(path) if crc32c is None else crc32c
            with open_regular(path) as source:
                self._put(name, source, os.fstat(source.fileno()).st_size, checksum)

    def copy(self, name: str, new_name: str) -> None:
        self._rewrite(name, self._bucket.blob(self._key(new_name)))

    def copy_to(self, name: str, target: Storage, *, crc32c: int) -> None:
        if not isinstance(target, GcsStorage):
            target.upload(self.fetch(name), name, crc32c=crc32c)
            return
        copied = target._bucket.blob(target._key(name))
        self._rewrite(name, copied)
        if _checksum(copied) != crc32c:
            target.delete(name)
            raise changed_before_upload(target.uri(name))

    def _rewrite(self, name: str, target: storage.Blob) -> None:
        source, token = self._bucket.blob(self._key(name)), None
        try:
            with _readable_errors("copying", self.uri(name)):
                while True:  # a large object may take several requests
                    token, _, _ = target.rewrite(source, token=token, **self._patience)
                    if token is None:
                        return
        except api.NotFound as error:
            raise _no_such_object(self.uri(name)) from error

    def fetch(self, name: str) -> Path:
        """The object in the cache folder, downloaded unless the file there has the object's size and CRC32C."""
        blob = self._lookup(name)
        if blob is None:
            raise _no_such_object(self.uri(name))
        target = cache_folder() / self._bucket.name / self._key(name)
        with os_errors(f"writing {target}"):
            target.parent.mkdir(parents=True, exist_ok=True)
            # Processes of one machine fetch the same shards: one downloads, the others wait.
            with os.fdopen(open_lock(target.parent / f"{TEMPORARY_PREFIX}lock-{target.name}"), "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                is_cached = target.is_file() and FileSum.of(target) == FileSum(_size(blob), _checksum(blob))
                if not is_cached:
                    self._download_file(name, target)
        return target

    def download(self, name: str, path: Path) -> None:
        with os_errors(f"writing {path}"), path.open("wb") as sink:
            self._download(name, sink)

    def _key(self, name: str) -> str:
        return self._prefix + clean_name(name)

    def _info(self, blob: storage.Blob) -> ObjectInfo:
        name = blob.name.removeprefix(self._prefix)
        return ObjectInfo(name, _size(blob), str(blob.generation), _checksum(blob))

    def _lookup(self, name: str) -> storage.Blob | None:
        """The object with its metadata, or None."""
        blob = self._bucket.blob(self._key(name))
        try:
            with _readable_errors("looking up", self.uri(name)):
                blob.reload(**self._patience)
        except api.NotFound:
            return None
        return blob

    def _put(
        self,
        name: str,
        source: IO[bytes],
        size_bytes: int,
        checksum: int,
        generation: int | None = None,
        metadata: dict[str, str] | None = None,
    ) -> None:
        blob = self._bucket.blob(self._key(name), chunk_size=UPLOAD_CHUNK_BYTES)
        # Checked by the server before the object exists; the library's own check comes after that.
        blob.crc32c = base64.b64encode(checksum.to_bytes(4, "big")).decode()
        if metadata is not None:  # else the library would send a null, which is no map
            blob.metadata = metadata
        for _ in range(TRANSFER_ATTEMPTS):
            source.seek(0)
            try:
                with _readable_errors("writing", self.uri(name)):
                    blob.upload_from_file(
                        source, size=size_bytes, checksum=None, if_generation_match=generation, **self._patience
                    )
                return
            except CorruptObjectError as error:  # on the way, or on this machine, where a retry fails again
                corruption: Exception = error
            except api.PreconditionFailed as error:
                # An emulator answers 412 where the service answers 400 to bytes with a wrong sum. If the generation
                # is still the expected one, the condition did not fail.
                if generation is not None and self._generation(name) != generation:
                    raise
                corruption = error
        raise changed_before_upload(self.uri(name)) from corruption

    def _generation(self, name: str) -> int:
        """The object's generation; 0 when there is none, as in a precondition."""
        there = self._lookup(name)
        return int(there.generation) if there else 0

    def _put_if(self, name: str, data: bytes, generation: int) -> bool:
        """Write over exactly this generation (0: no object). False when another generation is there."""
        nonce = uuid.uuid4().hex
        try:
            self._put(name, io.BytesIO(data), len(data), crc32c_of(data), generation, {NONCE_KEY: nonce})
        except api.PreconditionFailed:
            there = self._lookup(name)
            return bool(there and (there.metadata or {}).get(NONCE_KEY) == nonce)
        return True

    def _download(self, name: str, sink: IO[bytes], max_bytes: int | None = None) -> None:
        for _ in range(TRANSFER_ATTEMPTS):
            sink.seek(0)
            sink.truncate()
            summed = _Summed(sink, self.uri(name), max_bytes)
            blob = self._bucket.blob(self._key(name))
            try:
                with _readable_errors("reading", self.uri(name)):
                    blob.download_to_file(summed, checksum=None, **self._patience)
            except api.NotFound as error:
                raise _no_such_object(self.uri(name)) from error
            # The library compares nothing when an interrupted download was continued with a range.
            if summed.crc32c == _checksum(blob):
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


class _Summed:
    """Keeps the CRC32C of what is written to a sink, and refuses more than `max_bytes`."""

    def __init__(self, sink: IO[bytes], uri: str, max_bytes: int | None) -> None:
        self._sink, self._uri, self._max_bytes = sink, uri, max_bytes
        self.crc32c = self._bytes = 0

    def write(self, data: bytes) -> int:
        self._bytes += len(data)
        if self._max_bytes is not None and self._bytes > self._max_bytes:
            raise FileTooLargeError(self._uri, self._bytes, self._max_bytes)
        self.crc32c = int(google_crc32c.extend(self.crc32c, data))
        return self._sink.write(data)


def _default_client() -> storage.Client:
    return _client_for(os.environ.get("STORAGE_EMULATOR_HOST", ""))


@functools.cache
def _client_for(emulator: str) -> storage.Client:
    """One client per process: each new one looks for credentials. The library itself reads the emulator's address."""
    # Objects need no project, but storage.Client() refuses credentials that name none.
    return storage.Client(project="unused")


def _size(blob: storage.Blob) -> int:
    """An emulator omits the size of an empty object."""
    return int(blob.size or 0)


def _checksum(blob: storage.Blob) -> int:
    return int.from_bytes(base64.b64decode(blob.crc32c), "big")


def _no_such_object(uri: str) -> UserError:
    return UserError(f"no such object: {uri}", code=ExitCode.CONFIG)


@contextlib.contextmanager
def _readable_errors(doing: str, uri: str) -> Iterator[None]:
    """Translate the client library's errors for people, except an object's NotFound and PreconditionFailed."""
    try:
        yield
    except api.NotFound as error:
        if "bucket does not exist" not in str(error):  # 404 has two meanings
            raise
        bucket = uri.removeprefix("gs://").partition("/")[0]
        raise UserError(
            f"the bucket of {uri} does not exist",
            expected="an existing Cloud Storage bucket",
            fix=f"correct the name, or create it: gcloud storage buckets create gs://{bucket}",
            code=ExitCode.UNAVAILABLE,
        ) from error
    except (auth.DefaultCredentialsError, auth.RefreshError) as error:
        raise UserError(
            f"no usable Google Cloud credentials while {doing} {uri}",
            expected="application default credentials",
            fix="gcloud auth application-default login, or set GOOGLE_APPLICATION_CREDENTIALS to a key file",
            code=ExitCode.UNAVAILABLE,
        ) from error
    except (api.Forbidden, api.Unauthorized) as error:
        raise UserError(
            f"no permission while {doing} {uri}",
            expected="an account with the role roles/storage.objectUser on the bucket",
            fix=f"grant the role, or use another account. Google says: {error.message}",
            code=ExitCode.NO_PERMISSION,
        ) from error
    except api.BadRequest as error:
        if "crc32c" in error.message.lower():
            raise changed_before_upload(uri) from error
        raise ConfigError(f"Cloud Storage refused {doing} {uri}: {error.message}") from error
    except UNANSWERED as error:
        raise UserError(
            f"Cloud Storage did not answer properly while {doing} {uri}: {error}",
            expected="an answer before the deadline",
            fix="check the network (proxy, VPC, firewall) and try again; a run continues where it stood",
            code=ExitCode.UNAVAILABLE,
        ) from error
