"""The fake of Cloud Storage as two accounts see it: each may do on each bucket what its roles allow, and no more.

    with AccountsGcs({"pipeline": "127.0.0.1", "trainer": "localhost"}, roles) as server:
        environment = {"STORAGE_EMULATOR_HOST": server.endpoint_of("trainer")}

Tokens play no part in the emulator's protocol, so the host name in a request says which account it is.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from urllib.parse import unquote

from tests.fakes.gcs.server import FakeGcs, FaultyGcsHandler
from tests.fakes.google_apis import ROLES
from vlmpipe.rehearsal.http_server import ApiError

Roles = Mapping[tuple[str, str], set[str]]  # account and bucket -> roles


class AccountsGcs(FakeGcs):
    """The server. `denied` has what was refused, `used` the permissions that were needed, by account and bucket."""

    def __init__(self, hosts: Mapping[str, str], roles: Roles) -> None:
        super().__init__(sorted({bucket for _, bucket in roles}), handler=_Handler)
        self._hosts = hosts
        self.permissions = {
            key: {permission for role in of_key for permission in ROLES[role]} for key, of_key in roles.items()
        }
        self.denied: list[tuple[str, str, str]] = []
        self.used: dict[tuple[str, str], set[str]] = defaultdict(set)

    def endpoint_of(self, account: str) -> str:
        return self.endpoint.replace("127.0.0.1", self._hosts[account])

    def account_of(self, host: str) -> str:
        (account,) = (name for name, known in self._hosts.items() if known == host.partition(":")[0])
        return account


class _Handler(FaultyGcsHandler):
    fake: AccountsGcs

    def route(self, path: str, query: dict[str, str], body: bytes) -> None:
        copied = re.fullmatch(r"/storage/v1/b/([^/]+)/o/[^/]+/rewriteTo/b/([^/]+)/o/([^/]+)", path)
        if copied:
            source, target, name = map(unquote, copied.groups())
            self._require(source, "storage.objects.get")
            self._require(target, "storage.objects.create")
            if name in self.fake.buckets.get(target, {}):
                self._require(target, "storage.objects.delete")
        match = re.fullmatch(r"(/upload|/download|)/storage/v1/b/([^/]+)(/o(?:/([^/]+))?)?", path)
        if match:
            bucket, name = unquote(match[2]), unquote(match[4] or "")
            for permission in self._needed(match[1], bool(match[3]), name, query, body, bucket):
                self._require(bucket, permission)
        super().route(path, query, body)

    def _needed(
        self, area: str, of_objects: bool, name: str, query: dict[str, str], body: bytes, bucket: str
    ) -> list[str]:
        if not of_objects:
            return ["storage.buckets.get"]
        if area == "/upload":
            written = query.get("name") or (re.findall(rb'"name": ?"([^"]+)"', body[:2000]) or [b""])[0].decode()
            replaces = written in self.fake.buckets.get(bucket, {}) and query.get("ifGenerationMatch") != "0"
            return ["storage.objects.create", *(["storage.objects.delete"] if replaces else [])]
        if self.command == "DELETE":
            return ["storage.objects.delete"]
        return ["storage.objects.get" if name else "storage.objects.list"]

    def _require(self, bucket: str, permission: str) -> None:
        account = self.fake.account_of(self.headers.get("Host", ""))
        self.fake.used[account, bucket].add(permission)
        if permission not in self.fake.permissions.get((account, bucket), set()):
            self.fake.denied.append((account, bucket, permission))
            raise ApiError(403, f"{account} does not have {permission} access to the Google Cloud Storage bucket.")
