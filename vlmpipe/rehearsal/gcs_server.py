"""A small, strict stand-in for Google Cloud Storage's JSON API.

It enforces what our guarantees rest on and what public emulators skip: generation preconditions (412) and CRC32C on
upload (400). Requests that it does not know are answered 501.

    with GcsServer(buckets=["bucket"]) as server:
        server.places["bucket"] = {"location": "US", "locationType": "multi-region"}
"""

from __future__ import annotations

import base64
import json
import re
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import google_crc32c

from vlmpipe.rehearsal.http_server import ApiError, Handler, LocalServer

MAX_NAME_BYTES, MAX_METADATA_BYTES = 1024, 8192
ACME = ".well-known/acme-challenge/"


def is_object_name(name: str) -> bool:
    """Check an object's name by Cloud Storage's page on names."""
    is_short = 0 < len(name.encode()) <= MAX_NAME_BYTES
    return is_short and not set("\r\n") & set(name) and name not in (".", "..") and not name.startswith(ACME)


@dataclass
class StoredObject:
    """One live object. GCS keeps no older generation unless the bucket is versioned."""

    data: bytes
    generation: int
    metadata: dict[str, str]
    _summed: tuple[bytes, str] | None = None  # these bytes and their sum: a test may put others there

    def crc32c(self) -> str:
        if self._summed is None or self._summed[0] is not self.data:
            self._summed = self.data, base64.b64encode(google_crc32c.value(self.data).to_bytes(4, "big")).decode()
        return self._summed[1]


@dataclass
class ResumableUpload:
    """A session: what the first request asked for, and the bytes so far; none once it is finished."""

    bucket: str
    resource: dict[str, Any]
    query: dict[str, str]
    data: bytearray = field(default_factory=bytearray)
    finished: dict[str, object] | None = None  # asking a finished session again gives the same answer


class GcsServer(LocalServer):
    """The server."""

    def __init__(self, buckets: list[str], page_size: int = 1000, handler: type[Handler] | None = None) -> None:
        super().__init__(handler or GcsHandler)
        self.buckets: dict[str, dict[str, StoredObject]] = {name: {} for name in buckets}
        self.places: dict[str, dict[str, object]] = {}  # of a bucket's metadata; else it lies in us-central1
        self.uploads: dict[str, ResumableUpload] = {}
        self.page_size = page_size
        self._generation = 1000

    def objects(self, bucket: str) -> dict[str, StoredObject]:
        if bucket not in self.buckets:
            raise ApiError(404, "The specified bucket does not exist.")
        return self.buckets[bucket]

    def metadata(self, bucket: str) -> dict[str, object]:
        """A bucket's own resource."""
        self.objects(bucket)
        place = self.places.get(bucket, {"location": "US-CENTRAL1", "locationType": "region"})
        return {"kind": "storage#bucket", "name": bucket, "id": bucket, **place}

    def get(self, bucket: str, name: str, query: dict[str, str]) -> StoredObject:
        stored = self.objects(bucket).get(name)
        if stored is None or query.get("generation", str(stored.generation)) != str(stored.generation):
            raise ApiError(404, f"No such object: {bucket}/{name}")
        self._check_precondition(stored, query)
        return stored

    def insert(
        self, bucket: str, resource: dict[str, Any], query: dict[str, str], data: bytes
    ) -> tuple[str, StoredObject]:
        """Store an object if its precondition and its CRC32C hold; its name and what is stored."""
        name = resource.get("name") or query.get("name", "")
        if not is_object_name(name):
            raise ApiError(400, f"Invalid object name: {name!r}")
        metadata = resource.get("metadata") or {}
        if sum(len(text.encode()) for pair in metadata.items() for text in pair) > MAX_METADATA_BYTES:
            raise ApiError(400, f"The custom metadata takes more than {MAX_METADATA_BYTES} bytes.")
        objects = self.objects(bucket)
        self._check_precondition(objects.get(name), query)
        self._generation += 1
        stored = StoredObject(data, self._generation, resource.get("metadata") or {})
        claimed = resource.get("crc32c")
        if claimed and claimed != stored.crc32c():
            raise ApiError(400, f'Provided CRC32C "{claimed}" doesn\'t match calculated CRC32C "{stored.crc32c()}".')
        objects[name] = stored
        return name, stored

    def resource(self, bucket: str, name: str, stored: StoredObject) -> dict[str, object]:
        """An object's own resource."""
        return {
            "kind": "storage#object",
            "bucket": bucket,
            "name": name,
            "size": str(len(stored.data)),
            "generation": str(stored.generation),
            "metageneration": "1",
            "crc32c": stored.crc32c(),
            "metadata": stored.metadata,
        }

    def delete(self, bucket: str, name: str, query: dict[str, str]) -> None:
        self.get(bucket, name, query)
        del self.buckets[bucket][name]

    def _check_precondition(self, stored: StoredObject | None, query: dict[str, str]) -> None:
        requested = query.get("ifGenerationMatch")
        if requested is not None and int(requested) != (stored.generation if stored else 0):
            raise ApiError(412, "At least one of the pre-conditions you specified did not hold.")


# Query parameters that have no effect here. Unknown ones are refused, so that no test rests on an ignored one.
IGNORED_QUERY = {"projection", "prettyPrint", "alt"}
KNOWN_QUERY = {
    "ifGenerationMatch", "generation", "uploadType", "upload_id", "name", "prefix", "delimiter", "pageToken",
    "maxResults", "fields",
}  # fmt: skip


class GcsHandler(Handler):
    """Answers the requests of one connection."""

    fake: GcsServer

    def respond(self, body: bytes) -> None:
        try:
            path, query = self.path_and_query()
            with self.fake.lock:
                self.route(path, query, body)
        except ApiError as error:
            self.answer_json({"error": {"code": error.code, "message": error.message}}, error.code, error.headers)

    def route(self, path: str, query: dict[str, str], body: bytes) -> None:
        """Carry out and answer one request. Raises ApiError for what the real service refuses."""
        if unknown := query.keys() - KNOWN_QUERY - IGNORED_QUERY:
            raise ApiError(501, f"query parameters unknown to this fake: {sorted(unknown)}")
        match = re.fullmatch(r"(/upload|/download|)/storage/v1/b/([^/]+)(?:/o(?:/([^/]+))?)?", path)
        if not match:
            raise ApiError(501, f"no such route in this fake: {self.command} {path}")
        area, bucket, name = match[1], unquote(match[2]), unquote(match[3] or "")
        listing = path.endswith("/o")
        if area == "/upload" and listing:
            self._upload(bucket, query, body)
        elif area == "/download" and name and self.command == "GET":
            self.answer_media(self.fake.get(bucket, name, query))
        elif area == "" and name and self.command == "GET":
            self.answer_json(self.fake.resource(bucket, name, self.fake.get(bucket, name, query)))
        elif area == "" and name and self.command == "DELETE":
            self.fake.delete(bucket, name, query)
            self.answer(204, b"")
        elif area == "" and listing and self.command == "GET":
            self._list(bucket, query)
        elif area == "" and self.command == "GET":
            self.answer_json(self.fake.metadata(bucket))
        else:
            raise ApiError(501, f"no such route in this fake: {self.command} {path}")

    def _list(self, bucket: str, query: dict[str, str]) -> None:
        prefix, start = query.get("prefix", ""), query.get("pageToken", "")
        objects = self.fake.objects(bucket)
        names = sorted(
            {_up_to(query.get("delimiter", ""), name, prefix) for name in objects if name.startswith(prefix)}
        )
        names = [name for name in names if name > start]
        size = min(int(query.get("maxResults", self.fake.page_size)), self.fake.page_size)
        items = [self.fake.resource(bucket, name, objects[name]) for name in names[:size] if name in objects]
        answer: dict[str, object] = {"prefixes": [name for name in names[:size] if name not in objects]}
        if "fields" in query:  # the real service leaves out everything else
            fields = _item_fields(query["fields"])
            items = [{key: item[key] for key in fields if key in item} for item in items] if fields else []
            answer = answer if "prefixes" in query["fields"] else {}
        if items:
            answer["items"] = items
        if len(names) > size:
            answer["nextPageToken"] = names[size - 1]
        self.answer_json(answer)

    def _upload(self, bucket: str, query: dict[str, str], body: bytes) -> None:
        kind = query.get("uploadType")
        if self.command == "POST" and kind == "multipart":
            resource, data = _split_multipart(self.headers["Content-Type"], body)
            self.answer_json(
                self.fake.resource(bucket, *self.fake.insert(bucket, resource, query, self.received(data)))
            )
        elif self.command == "POST" and kind == "resumable":
            self.fake.objects(bucket)
            session = f"session-{len(self.fake.uploads)}"
            self.fake.uploads[session] = ResumableUpload(bucket, json.loads(body or b"{}"), query)
            where = f"{self.fake.endpoint}/upload/storage/v1/b/{bucket}/o?uploadType=resumable&upload_id={session}"
            self.answer(200, b"", {"Location": where})
        elif self.command == "PUT" and kind == "resumable":
            self._resume(query.get("upload_id", ""), body)
        else:
            raise ApiError(501, f"upload type unknown to this fake: {self.command} {kind}")

    def _resume(self, session: str, body: bytes) -> None:
        upload = self.fake.uploads.get(session)
        if upload is None:
            raise ApiError(404, "No such upload session.")
        span = re.fullmatch(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)", self.headers.get("Content-Range", ""))
        if not span:
            raise ApiError(400, "Invalid Content-Range")
        if upload.finished is not None:
            return self.answer_json(upload.finished)
        if span[1] is not None:
            last = span[3] != "*" and int(span[2]) + 1 == int(span[3])
            if not last and len(body) % (256 << 10):
                raise ApiError(400, "A chunk that is not the last must be a multiple of 256 KiB.")
            known = len(upload.data) - int(span[1])  # bytes sent before: ignored, as the real service does
            if known < 0 or int(span[2]) - int(span[1]) + 1 != len(body):
                raise ApiError(400, "The chunk does not continue what is stored, or has not the size it names.")
            upload.data += self.received(body[known:])
        if span[3] == "*" or len(upload.data) < int(span[3]):
            received = {"Range": f"bytes=0-{len(upload.data) - 1}"} if upload.data else {}
            self.answer(308, b"", received)
            return
        stored = self.fake.insert(upload.bucket, upload.resource, upload.query, bytes(upload.data))
        upload.data, upload.finished = bytearray(), self.fake.resource(upload.bucket, *stored)
        self.answer_json(upload.finished)

    def answer_media(self, stored: StoredObject) -> None:
        data, status, headers = stored.data, 200, {"X-Goog-Hash": f"crc32c={stored.crc32c()}"}
        headers["X-Goog-Generation"] = str(stored.generation)
        if span := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start, end = int(span[1]), min(int(span[2] or len(data)), len(data) - 1)
            if start >= len(data):
                raise ApiError(416, "Requested range not satisfiable")
            headers["Content-Range"] = f"bytes {start}-{end}/{len(data)}"
            data, status = data[start : end + 1], 206
        self.answer(status, data, headers)

    def answer_json(self, answer: dict[str, object], code: int = 200, headers: dict[str, str] | None = None) -> None:
        self.answer(code, json.dumps(answer).encode(), {"Content-Type": "application/json", **(headers or {})})

    def answer(self, code: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        length = {"Content-Length": str(len(body))} if code != 204 else {}
        self.send(code, {**(headers or {}), **length})
        self.wfile.write(body)

    def received(self, data: bytes) -> bytes:
        """An object's bytes as they arrived; a fake of tests may change them."""
        return data


def _item_fields(fields: str) -> list[str]:
    """Fields of each object that a listing requests; empty for one of folders alone."""
    if fields == "prefixes,nextPageToken":
        return []
    match = re.search(r"items\(([^)]*)\)", fields)
    if not match:
        raise ApiError(501, f"fields unknown to this fake: {fields}")
    return match[1].split(",")


def _up_to(delimiter: str, name: str, prefix: str) -> str:
    """The name, or its folder below `prefix` if there is a delimiter after that."""
    below, separator, _ = name[len(prefix) :].partition(delimiter) if delimiter else (name, "", "")
    return prefix + below + separator if separator else name


def _split_multipart(content_type: str, body: bytes) -> tuple[dict[str, object], bytes]:
    """The two parts of multipart/related: the object's resource as JSON, and its bytes."""
    match = re.search(r'boundary="?([^";]+)"?', content_type)
    if not match:
        raise ApiError(400, "multipart body without a boundary")
    parts = body.split(b"--" + match[1].encode())
    if len(parts) != 4 or parts[3].strip() != b"--":
        raise ApiError(400, "expected exactly two parts")
    resource, data = (part.partition(b"\r\n\r\n")[2][:-2] for part in parts[1:3])
    return json.loads(resource), data
