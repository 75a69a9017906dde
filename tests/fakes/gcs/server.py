"""Fake of Cloud Storage: the rehearsal's server with faults, permissions, copies and other services' answers.

with FakeGcs(buckets=["bucket"]) as server:
    server.granted["bucket"] = {"storage.objects.get"}  # of a bucket's metadata and no more is that heeded
    client = server.client()
    server.faults.append(Fault("drop_after", method="POST"))
"""

from __future__ import annotations

import re
import time
from typing import Any, Literal
from urllib.parse import parse_qs, unquote, urlsplit

from google.auth.credentials import AnonymousCredentials
from google.cloud import storage

from tests.fakes.faulty_server import FaultyServer
from tests.fakes.gcs.faults import Fault as Fault
from vlmpipe.rehearsal.gcs_server import GcsHandler, GcsServer, StoredObject
from vlmpipe.rehearsal.http_server import ApiError

TRICKLE_PIECES, TRICKLE_S = 8, 0.05  # pieces of a body, and the pause before each

Form = Literal["null_metadata", "no_zero_size", "checksum_412"]
"""Forms of answers in which Google's own storage-testbench differs from what this server answers otherwise.

null_metadata: an object without metadata has a null there, and an upload that sends one is refused. no_zero_size: an
empty object has no size. checksum_412: bytes with another CRC32C are refused as a condition that failed, not with 400.
"""


class FakeGcs(FaultyServer, GcsServer):
    """The server: state in memory, one thread a connection, one lock around each request's effect."""

    def __init__(
        self, buckets: list[str], page_size: int = 1000, handler: type[FaultyGcsHandler] | None = None
    ) -> None:
        super().__init__(buckets, page_size, handler or FaultyGcsHandler)
        self.granted: dict[str, set[str]] = {}  # what the caller may, for buckets where that is not everything
        self.forms: set[Form] = set()
        self.ranges: list[str] = []  # what each download asked for; empty is the whole
        self.downloads: list[tuple[str, int]] = []  # name and sent bytes of each
        self.arrivals_s: list[float] = []  # when each request arrived, by the monotonic clock

    def client(self) -> storage.Client:
        """The real client library, talking to this server."""
        return storage.Client(
            project="test", credentials=AnonymousCredentials(), client_options={"api_endpoint": self.endpoint}
        )

    def metadata(self, bucket: str) -> dict[str, Any]:
        found = super().metadata(bucket)
        if "storage.buckets.get" not in self.granted.get(bucket, {"storage.buckets.get"}):
            denied = "Permission 'storage.buckets.get' denied on resource (or it may not exist)."
            raise ApiError(403, f"caller does not have storage.buckets.get access. {denied}")
        return found

    def permissions(self, bucket: str, asked: list[str]) -> dict[str, Any]:
        """Those asked for that the caller has; the question itself needs none."""
        self.objects(bucket)
        has = [name for name in asked if name in self.granted.get(bucket, asked)]
        return {"kind": "storage#testIamPermissionsResponse", **({"permissions": has} if has else {})}

    def insert(
        self, bucket: str, resource: dict[str, Any], query: dict[str, str], data: bytes
    ) -> tuple[str, StoredObject]:
        if "null_metadata" in self.forms and resource.get("metadata", {}) is None:
            raise ApiError(400, "metadata: expected a map of texts, found null")
        try:
            return super().insert(bucket, resource, query, data)
        except ApiError as error:
            if "checksum_412" in self.forms and "CRC32C" in error.message:
                raise ApiError(412, error.message) from None
            raise

    def resource(self, bucket: str, name: str, stored: StoredObject) -> dict[str, Any]:
        resource = super().resource(bucket, name, stored)
        if "null_metadata" in self.forms and not stored.metadata:
            resource["metadata"] = None
        if "no_zero_size" in self.forms and not stored.data:
            del resource["size"]
        return resource


class FaultyGcsHandler(GcsHandler):
    fake: FakeGcs
    fault: Fault | None = None
    _is_media = False

    def respond(self, body: bytes) -> None:
        self.fake.arrivals_s.append(time.monotonic())
        self.fault = self.fake.take_fault(self.command, self.path, body)
        if self.fault and self.fault.action in ("drop_before", "stall"):
            self._hang_up()
            return
        super().respond(body)
        if self.fault and self.fault.action == "stall_midway":
            self._hang_up()

    def route(self, path: str, query: dict[str, str], body: bytes) -> None:
        if self.fault and self.fault.action == "status":
            wait_s = self.fault.retry_after_s
            raise ApiError(self.fault.code, "fault rule", headers={"Retry-After": str(wait_s)} if wait_s else {})
        if copied := re.fullmatch(r"/storage/v1/b/([^/]+)/o/([^/]+)/rewriteTo/b/([^/]+)/o/([^/]+)", path):
            bucket, name, to_bucket, to_name = map(unquote, copied.groups())
            return self._rewrite(bucket, name, to_bucket, to_name, query)
        if asked := re.fullmatch(r"/storage/v1/b/([^/]+)/iam/testPermissions", path):
            wanted = parse_qs(urlsplit(self.path).query).get("permissions", [])
            return self.answer_json(self.fake.permissions(unquote(asked[1]), wanted))
        return super().route(path, query, body)

    def _rewrite(self, bucket: str, name: str, to_bucket: str, to_name: str, query: dict[str, str]) -> None:
        """Copy within the service. Small objects, as those of a test, take one request of the several it may take."""
        if conditions := [name for name in query if name.startswith("if")]:
            raise ApiError(501, f"conditions of a copy are unknown to this fake: {conditions}")
        data = self.fake.get(bucket, name, query).data
        there = self.fake.resource(to_bucket, *self.fake.insert(to_bucket, {"name": to_name}, {}, data))
        size = {"totalBytesRewritten": str(len(data)), "objectSize": str(len(data))}
        self.answer_json({"kind": "storage#rewriteResponse", "done": True, "resource": there} | size)

    def received(self, data: bytes) -> bytes:
        if self.fault and self.fault.action == "corrupt_request" and data:
            return data[:-1] + bytes([data[-1] ^ 1])
        return data

    def answer_media(self, stored: StoredObject) -> None:
        self.fake.ranges.append(self.headers.get("Range", ""))
        self._is_media = True
        super().answer_media(stored)

    def answer(self, code: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        if self._is_media:
            self.fake.downloads.append((unquote(urlsplit(self.path).path.rpartition("/o/")[2]), len(body)))
            self._is_media = False  # the handler answers all requests of a connection
        action = self.fault.action if self.fault else None
        if action == "drop_after":
            self.close_connection = True
            return
        length = {"Content-Length": str(len(body))} if code != 204 else {}
        self.send(code, {**(headers or {}), **length})
        if action in ("truncate", "stall_midway"):
            self.close_connection = True
            body = body[: len(body) // 2]
        if action == "corrupt" and body:
            body = bytes([body[0] ^ 1]) + body[1:]
        if action == "trickle":
            size_bytes = -(-len(body) // TRICKLE_PIECES)
            for start in range(0, len(body), size_bytes):
                self.fake.closing.wait(TRICKLE_S)
                self.wfile.write(body[start : start + size_bytes])
            return
        self.wfile.write(body)

    def _hang_up(self) -> None:
        """Close the connection; after a stall not before the server itself closes."""
        if self.fault and self.fault.action.startswith("stall"):
            self.fake.closing.wait()
        self.close_connection = True
