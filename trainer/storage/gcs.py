"""Google Cloud Storage behind the Storage protocol.

Every upload carries its CRC32C, so that the server refuses changed bytes; every download is checked against the
server's. Transient failures are retried until a deadline. A retried conditional write whose first answer was lost gets
412 for its own object, which a nonce in the metadata identifies: two writers may write equal bytes.

STORAGE_EMULATOR_HOST points the client at an emulator or test server.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import io
import os
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import IO
from urllib.parse import urlsplit

import requests
from google.api_core import exceptions as api
from google.api_core.retry import Retry
from google.auth import exceptions as auth
from google.cloud import storage
from google.cloud.storage.retry import DEFAULT_RETRY

from vlmpipe.trainer.errors import ConfigError, ExitCode, UserError
from vlmpipe.trainer.storage.base import (
    AlreadyExistsError,
    CorruptObjectError,
    ObjectInfo,
    Storage,
    VersionConflictError,
    changed_before_upload,
    crc32c_of,
)
from vlmpipe.trainer.storage.bucket import (
    NONCE_KEY,
    REQUESTS,
    TRANSFER_ATTEMPTS,
    BucketStorage,
    Summed,
    no_such_object,
)
from vlmpipe.trainer.storage.outage import SOON_S, must_answer_soon

# The library's tracing reads each bucket's metadata, which needs a permission that jobs lack.
os.environ.setdefault("DISABLE_GCS_PYTHON_CLIENT_OTEL_BUCKET_METADATA", "true")
TIMEOUT_S = 60.0  # without a byte from the server, after which the request is retried
LONGEST_RETRY_AFTER_S = 60.0
# Memory of one upload, which waits for an answer after each chunk; the library's default is 100 MiB.
UPLOAD_CHUNK_BYTES = 64 << 20
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
SOON = Retry(predicate=DEFAULT_RETRY._predicate, initial=0.2, timeout=SOON_S)  # a timeout ends it, a 503 does not


class GcsStorage(BucketStorage):
    """Objects under `gs://bucket/path`."""

    scheme, product = "gs://", "Cloud Storage"

    def __init__(
        self,
        root_uri: str,
        *,
        client: storage.Client | None = None,
        retry: Retry | None = None,
        timeout_s: float | None = None,
    ) -> None:
        super().__init__(root_uri)
        usual = (SOON, SOON_S) if must_answer_soon() else (RETRY, TIMEOUT_S)
        self._patience: dict[str, object] = {"retry": retry or usual[0], "timeout": timeout_s or usual[1]}
        with _readable_errors("connecting to", self.root_uri):
            self._bucket = (client or _default_client()).bucket(self.bucket_name)

    def stat(self, name: str) -> ObjectInfo | None:
        blob = self._lookup(name)
        return self._info(blob) if blob else None

    def read_range(self, name: str, start: int, end: int, *, version: str = "") -> bytes:
        if end <= start:  # a Range header cannot ask for nothing
            return b""
        blob, only = self._bucket.blob(self._key(name)), {"if_generation_match": int(version)} if version else {}
        try:
            with _readable_errors("reading", self.uri(name)):
                data = blob.download_as_bytes(start=start, end=end - 1, checksum=None, **only, **self._patience)
        except api.NotFound as error:
            raise no_such_object(self.uri(name)) from error
        except api.PreconditionFailed as error:
            raise VersionConflictError(self.uri(name)) from error
        except api.RequestRangeNotSatisfiable:  # the object ends before
            return b""
        return bytes(data)

    def create(self, name: str, data: bytes) -> None:
        if not self._put_if(name, data, generation=0):
            raise AlreadyExistsError(self.uri(name))

    def replace(self, name: str, data: bytes, expected_version: str) -> None:
        if not self._put_if(name, data, generation=int(expected_version or 0)):
            raise VersionConflictError(self.uri(name))

    def delete(self, name: str) -> None:
        with contextlib.suppress(api.NotFound), _readable_errors("deleting", self.uri(name)):
            self._bucket.blob(self._key(name)).delete(**self._patience)

    def copy(self, name: str, new_name: str) -> None:
        self._rewrite(name, self._bucket.blob(self._key(new_name)))

    def copy_to(self, name: str, target: Storage, *, crc32c: int) -> None:
        if not isinstance(target, GcsStorage):
            self._pass_on(name, target, name, crc32c)
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
            raise no_such_object(self.uri(name)) from error

    def _listed(self, prefix: str) -> Sequence[ObjectInfo]:
        folder = self._key(prefix) + "/" if prefix else self._prefix
        with _readable_errors("listing", f"gs://{self.bucket_name}/{folder}"):
            blobs = self._bucket.list_blobs(
                prefix=folder, fields="items(name,size,generation,crc32c),nextPageToken", **self._patience
            )
            return [self._info(blob) for blob in blobs]

    def folders(self, prefix: str) -> Sequence[str]:
        folder = self._key(prefix) + "/"
        with _readable_errors("listing", f"gs://{self.bucket_name}/{folder}"):
            listed = self._bucket.list_blobs(
                prefix=folder, delimiter="/", fields="prefixes,nextPageToken", **self._patience
            )
            for _ in listed:  # its prefixes are known at its end
                pass
        return sorted(name.removeprefix(folder).rstrip("/") for name in listed.prefixes)

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

    def _transfer(self, name: str, sink: Summed) -> int:
        blob = self._bucket.blob(self._key(name))
        try:
            with _readable_errors("reading", self.uri(name)):
                blob.download_to_file(sink, checksum=None, **self._patience)
        except api.NotFound as error:
            raise no_such_object(self.uri(name)) from error
        # The library compares nothing when an interrupted download was continued with a range.
        return _checksum(blob)


def _default_client() -> storage.Client:
    return _client_for(os.environ.get("STORAGE_EMULATOR_HOST", ""))


@functools.cache
def _client_for(emulator: str) -> storage.Client:
    """One client per process: each new one looks for credentials. The library itself reads the emulator's address."""
    # Objects need no project, but storage.Client() refuses credentials that name none.
    client = storage.Client(project="unused")
    client._http.hooks["response"].append(_count)
    return client


def _count(response: requests.Response, **_: object) -> None:
    """Count an answered request, retries included. The parts of an upload are one write."""
    method, url = str(response.request.method), urlsplit(str(response.request.url))
    is_write = method == "POST" or (method in ("PUT", "PATCH") and "upload_id=" not in url.query)
    if is_write or (method == "GET" and url.path.endswith("/o")):
        REQUESTS.add(class_a=1)
    elif method == "GET":
        REQUESTS.add(class_b=1)


def _size(blob: storage.Blob) -> int:
    """An emulator omits the size of an empty object."""
    return int(blob.size or 0)


def _checksum(blob: storage.Blob) -> int:
    return int.from_bytes(base64.b64decode(blob.crc32c), "big")


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
