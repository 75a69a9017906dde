"""A proxy in front of a real S3 server that breaks chosen requests on purpose."""

from __future__ import annotations

import http.client
from urllib.parse import urlsplit

from tests.fakes.faulty_server import FaultyServer
from tests.fakes.gcs.faults import Fault
from vlmpipe.rehearsal.http_server import Handler

OF_ONE_CONNECTION = ("connection", "transfer-encoding", "content-length")


class FaultyProxy(FaultyServer):
    """Hands every request on to `upstream`, unless a fault says otherwise."""

    def __init__(self, upstream: str) -> None:
        super().__init__(_ProxyHandler)
        self.upstream = urlsplit(upstream).netloc
        self.error_codes: dict[int, str] = {}  # S3's word for a status that a fault answers
        self.ranges: list[str] = []  # what each download asked for; empty is the whole


class _ProxyHandler(Handler):
    fake: FaultyProxy

    def respond(self, body: bytes) -> None:
        fault: Fault | None = self.fake.take_fault(self.command, self.path, body)
        action = fault.action if fault else ""
        if fault and action == "status":
            self._refuse(fault.code)
            return
        if action == "drop_before":
            self.close_connection = True
            return
        if self.command == "GET":
            self.fake.ranges.append(self.headers.get("Range", ""))
        if action == "corrupt_request" and body:
            body = body[:-1] + bytes([body[-1] ^ 1])
        upstream = http.client.HTTPConnection(self.fake.upstream, timeout=30)
        # The Host that the client signed is this proxy's: it travels as it is.
        upstream.request(self.command, self.path, body, dict(self.headers.items()))
        answer = upstream.getresponse()
        data = answer.read()
        upstream.close()
        if action == "drop_after":
            self.close_connection = True
            return
        headers = {name: value for name, value in answer.getheaders() if name.lower() not in OF_ONE_CONNECTION}
        length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(data))
        self.send(answer.status, headers if answer.status == 204 else {**headers, "Content-Length": length or "0"})
        if action == "truncate":
            self.close_connection = True
            data = data[: len(data) // 2]
        if action == "corrupt" and data:
            data = bytes([data[0] ^ 1]) + data[1:]
        self.wfile.write(data)

    def _refuse(self, status: int) -> None:
        code = self.fake.error_codes.get(status, "")
        data = f"<Error><Code>{code}</Code><Message>a fault</Message></Error>".encode() if code else b""
        self.send(status, {"Content-Length": str(len(data)), "Content-Type": "application/xml"})
        self.wfile.write(data)

    do_HEAD = Handler._serve
