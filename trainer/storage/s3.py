"""Amazon S3, and servers with its API such as MinIO, behind the Storage protocol.

Every upload carries its CRC32C, so that the server refuses changed bytes; downloads are checked against the server's,
of objects that have one. A create-only write is a PUT with If-None-Match, a compare-and-swap one with If-Match
(docs.aws.amazon.com/AmazonS3/latest/userguide/conditional-writes.html). An object's version is its ETag, which follows
from its bytes: a swap does not see that an object was changed and changed back, which no caller needs.

AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL points the client at another server than Amazon's; credentials and region come
from where Amazon's own tools look for them.
"""

from __future__ import annotations

import base64
import contextlib
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, NotRequired, Protocol, TypedDict

from botocore import exceptions as boto
from botocore.client import BaseClient

from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.storage.base import (
    TEMPORARY_PREFIX,
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
    TRANSFER_ATTEMPTS,
    BucketStorage,
    Summed,
    no_such_object,
)
from vlmpipe.trainer.storage.outage import must_answer_soon
from vlmpipe.trainer.storage.s3_api.client import ATTEMPTS, default_client, soon_client
from vlmpipe.trainer.storage.s3_api.errors import (
    UNANSWERED,
    ConditionError,
    EndedError,
    MissingError,
    code_of,
    readable_errors,
    unanswered,
)

PART_BYTES = 64 << 20  # of an upload; 10,000 of them are 625 GiB, and each is in memory
LARGEST_COPY_BYTES = 5 << 30  # in one request: docs.aws.amazon.com/AmazonS3/latest/API/API_CopyObject.html
DOWNLOAD_CHUNK_BYTES = 1 << 20
FIRST_WAIT_S, LONGEST_WAIT_S = 0.1, 5.0  # while another conditional write of the same object is under way
CORRUPT = -1  # a CRC32C that no bytes have


class Head(TypedDict):
    """Facts about an object, as S3 answers a request for them."""

    ContentLength: int
    ETag: str
    Metadata: NotRequired[dict[str, str]]
    ChecksumCRC32C: NotRequired[str]


class Stream(Protocol):
    """The bytes of an answer."""

    def iter_chunks(self, chunk_size: int) -> Iterator[bytes]: ...


class Reading(Head):
    """The answer to a request for an object."""

    Body: Stream


class S3Storage(BucketStorage):
    """Objects under `s3://bucket/path`."""

    scheme, product = "s3://", "S3"

    def __init__(self, root_uri: str, *, client: BaseClient | None = None) -> None:
        super().__init__(root_uri)
        with readable_errors("connecting to", self.root_uri):
            self._client = client or (soon_client() if must_answer_soon() else default_client())

    def stat(self, name: str) -> ObjectInfo | None:
        head = self._head(name)
        if head is None:
            return None
        return ObjectInfo(name, int(head["ContentLength"]), str(head["ETag"]), _checksum(head))

    def read_range(self, name: str, start: int, end: int, *, version: str = "") -> bytes:
        if end <= start:  # a Range header cannot ask for nothing
            return b""
        asked = {**self._at(name), "Range": f"bytes={start}-{end - 1}", **({"IfMatch": version} if version else {})}
        breaks = 0
        try:
            with readable_errors("reading", self.uri(name)):
                while True:
                    answer = self._client.get_object(**asked)
                    try:
                        return bytes(answer["Body"].read())
                    except UNANSWERED:
                        breaks += 1
                        if breaks == TRANSFER_ATTEMPTS:
                            raise
        except MissingError as error:
            raise no_such_object(self.uri(name)) from error
        except ConditionError as error:
            raise VersionConflictError(self.uri(name)) from error
        except EndedError:
            return b""

    def create(self, name: str, data: bytes) -> None:
        if not self._put_if(name, data, {"IfNoneMatch": "*"}):
            raise AlreadyExistsError(self.uri(name))

    def replace(self, name: str, data: bytes, expected_version: str) -> None:
        condition = {"IfMatch": expected_version} if expected_version else {"IfNoneMatch": "*"}
        if not self._put_if(name, data, condition):
            raise VersionConflictError(self.uri(name))

    def delete(self, name: str) -> None:
        with readable_errors("deleting", self.uri(name)):
            self._client.delete_object(**self._at(name))

    def copy(self, name: str, new_name: str) -> None:
        self._copy(name, self, new_name)

    def copy_to(self, name: str, target: Storage, *, crc32c: int) -> None:
        if not isinstance(target, S3Storage):
            self._pass_on(name, target, name, crc32c)
            return
        self._copy(name, target, name)
        copied = target.stat(name)
        if copied is None or copied.crc32c != crc32c:
            target.delete(name)
            raise changed_before_upload(target.uri(name))

    def _copy(self, name: str, target: S3Storage, new_name: str) -> None:
        info = self.stat(name)
        if info is None:
            raise no_such_object(self.uri(name))
        if info.size_bytes > LARGEST_COPY_BYTES:
            self._pass_on(name, target, new_name, info.crc32c)
            return
        try:
            with readable_errors("copying", self.uri(name)):
                source = {"CopySource": self._at(name), "CopySourceIfMatch": info.version}
                self._client.copy_object(**target._at(new_name), **source)
        except (MissingError, ConditionError) as error:
            raise CorruptObjectError(f"{self.uri(name)} was deleted or replaced while it was copied") from error

    def _at(self, name: str) -> dict[str, str]:
        return {"Bucket": self.bucket_name, "Key": self._key(name)}

    def _listed(self, prefix: str) -> Sequence[ObjectInfo]:
        folder = self._key(prefix) + "/" if prefix else self._prefix
        with readable_errors("listing", f"{self.scheme}{self.bucket_name}/{folder}"):
            pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket_name, Prefix=folder)
            contents = [content for page in pages for content in page.get("Contents", ())]
        return [
            ObjectInfo(content["Key"].removeprefix(self._prefix), int(content["Size"]), content["ETag"])
            for content in contents
        ]

    def folders(self, prefix: str) -> Sequence[str]:
        folder = self._key(prefix) + "/"
        asked = {"Bucket": self.bucket_name, "Prefix": folder, "Delimiter": "/"}
        with readable_errors("listing", f"{self.scheme}{self.bucket_name}/{folder}"):
            pages = self._client.get_paginator("list_objects_v2").paginate(**asked)
            names = [common["Prefix"] for page in pages for common in page.get("CommonPrefixes", ())]
        return sorted(name.removeprefix(folder).rstrip("/") for name in names)

    def _head(self, name: str) -> Head | None:
        try:
            with readable_errors("looking up", self.uri(name)):
                head: Head = self._client.head_object(**self._at(name), ChecksumMode="ENABLED")
        except MissingError:
            return None
        return head

    def _put(self, name: str, source: IO[bytes], size_bytes: int, checksum: int) -> None:
        with readable_errors("writing", self.uri(name)):
            source.seek(0)
            if size_bytes <= PART_BYTES:
                self._client.put_object(**self._at(name), Body=source.read(), ChecksumCRC32C=_encoded(checksum))
            else:
                self._put_parts(name, source, checksum)

    def _put_parts(self, name: str, source: IO[bytes], checksum: int) -> None:
        kind = {"ChecksumType": "FULL_OBJECT"}
        begun = self._client.create_multipart_upload(**self._at(name), ChecksumAlgorithm="CRC32C", **kind)
        upload = {**self._at(name), "UploadId": begun["UploadId"]}
        parts: list[dict[str, object]] = []
        try:
            while data := source.read(PART_BYTES):
                part = {"PartNumber": len(parts) + 1, "ChecksumCRC32C": _encoded(crc32c_of(data))}
                parts.append({**part, "ETag": self._client.upload_part(**upload, **part, Body=data)["ETag"]})
            self._client.complete_multipart_upload(
                **upload, MultipartUpload={"Parts": parts}, ChecksumCRC32C=_encoded(checksum), **kind
            )
        except Exception as error:
            there = self._head(name) if code_of(error) == "NoSuchUpload" else None
            if there and _checksum(there) == checksum:  # the answer of an earlier try was lost
                return
            with contextlib.suppress(boto.BotoCoreError, boto.ClientError):
                self._client.abort_multipart_upload(**upload)  # else its parts are kept, and paid for
            raise

    def _put_if(self, name: str, data: bytes, condition: Mapping[str, str]) -> bool:
        """Write where the condition holds. False where it does not."""
        nonce = uuid.uuid4().hex
        checksum = _encoded(crc32c_of(data))
        for attempt in range(ATTEMPTS):
            try:
                with readable_errors("writing", self.uri(name)):
                    self._client.put_object(
                        **self._at(name), **condition, Body=data, ChecksumCRC32C=checksum, Metadata={NONCE_KEY: nonce}
                    )
                return True
            except (MissingError, ConditionError) as error:
                there = self._head(name)
                if there and there.get("Metadata", {}).get(NONCE_KEY) == nonce:  # the answer of an earlier try was lost
                    return True
                if isinstance(error, MissingError) or not error.is_busy:
                    return False
            time.sleep(min(FIRST_WAIT_S * 2**attempt, LONGEST_WAIT_S))  # Amazon asks to try again
        raise unanswered("another conditional write of it does not end", "writing", self.uri(name))

    def _transfer(self, name: str, sink: Summed) -> int | None:
        answer = self._begin_reading(name)
        checksum, size_bytes, breaks = _checksum(answer), int(answer["ContentLength"]), 0
        try:
            with readable_errors("reading", self.uri(name)):
                while True:
                    begun = sink.bytes
                    try:
                        for data in answer["Body"].iter_chunks(DOWNLOAD_CHUNK_BYTES):
                            sink.write(data)
                    except UNANSWERED:
                        breaks = 0 if sink.bytes > begun else breaks + 1
                        if breaks == TRANSFER_ATTEMPTS:
                            raise
                    if sink.bytes >= size_bytes:
                        return checksum
                    rest = {"Range": f"bytes={sink.bytes}-", "IfMatch": answer["ETag"]}
                    answer = self._client.get_object(**self._at(name), **rest)
        except (boto.FlexibleChecksumError, ConditionError, MissingError):  # another sum; replaced, deleted meanwhile
            return CORRUPT

    def _begin_reading(self, name: str) -> Reading:
        try:
            with readable_errors("reading", self.uri(name)):
                answer: Reading = self._client.get_object(**self._at(name), ChecksumMode="ENABLED")
        except MissingError as error:
            raise no_such_object(self.uri(name)) from error
        return answer


def require_conditional_writes(store: S3Storage) -> None:
    """Raise ConfigError for a server that lets two writers succeed where one must fail, as some do.

    Checkpoints are committed by writes that create, and starts of a run counted by swaps.
    """
    name = f"{TEMPORARY_PREFIX}probe-{uuid.uuid4().hex}"
    store.create(name, b"first")
    first = store.stat(name)
    try:
        refused = {
            "creating an object that is there": _is_refused(lambda: store.create(name, b"second")),
            "swapping one that has changed": _is_refused(lambda: store.replace(name, b"third", '"another"')),
        }
        store.delete(name)
        version = first.version if first else ""
        refused["swapping one that is gone"] = _is_refused(lambda: store.replace(name, b"fourth", version))
    finally:
        store.delete(name)
    if ignored := [write for write, is_refused in refused.items() if not is_refused]:
        raise ConfigError(
            f"the server of {store.root_uri} refuses no write whose condition fails: {', '.join(ignored)}",
            expected="a server with conditional writes, such as Amazon S3, SeaweedFS 4 or a MinIO after August 2025",
            fix="update the server, or set output.root_uri to another store",
        )


def _is_refused(write: Callable[[], None]) -> bool:
    try:
        write()
    except (AlreadyExistsError, VersionConflictError):
        return True
    return False


def holds_objects(uri: str) -> bool:
    """Return whether a key begins with this one, which may be empty. Answers soon, also where nothing can be
    reached.
    """
    bucket, _, prefix = uri.removeprefix(S3Storage.scheme).partition("/")
    with readable_errors("looking up", uri):
        client = soon_client()
        return bool(client.list_objects_v2(Bucket=bucket, Prefix=prefix, MaxKeys=1).get("KeyCount"))


def _encoded(checksum: int) -> str:
    return base64.b64encode(checksum.to_bytes(4, "big")).decode()


def _checksum(answer: Head) -> int | None:
    """CRC32C of the whole object; None without one, or with one of its parts' sums, which ends with their number."""
    encoded = str(answer.get("ChecksumCRC32C") or "")
    return int.from_bytes(base64.b64decode(encoded), "big") if encoded and "-" not in encoded else None
