"""A small HTTP server that stands in for a webhook and for Secret Manager, for tests.

As projects.secrets.versions.access: a version is named in full, another method or name is 404, one that the caller may
not read is 403. A webhook takes JSON, and nothing else.
"""

from __future__ import annotations

import base64
import json
import re
from http.server import BaseHTTPRequestHandler
from typing import Any

from vlmpipe.rehearsal.http_server import HttpServer

ACCESS = re.compile(r"/v1/projects/[^/]+/secrets/[\w-]{1,255}/versions/([1-9]\d*|[a-z][\w-]*):access")


class Receiver(HttpServer):
    """Keeps what is posted; answers with the next of `codes`, then with 200. `secrets` are Secret Manager's, which is
    as often busy as `secret_codes` says; `asked` are the names that were asked for."""

    def __init__(self) -> None:
        super().__init__(_handler_class(self))
        self.messages: list[dict[str, Any]] = []
        self.codes: list[int] = []
        self.secrets: dict[str, str] = {}
        self.secret_codes: list[int] = []
        self.asked: list[str] = []


def _handler_class(receiver: Receiver) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            code = receiver.codes.pop(0) if receiver.codes else 200
            if self.headers.get("Content-Type") != "application/json":
                code = 415
            if code == 200:
                receiver.messages.append(json.loads(body))
            self._answer(code, {})

        def do_GET(self) -> None:
            name = self.path.removeprefix("/v1/").removesuffix(":access")
            receiver.asked.append(name)
            if receiver.secret_codes:
                self._answer(receiver.secret_codes.pop(0), {})
                return
            if not ACCESS.fullmatch(self.path) or name not in receiver.secrets:
                self._answer(403 if "forbidden" in name else 404, {})
                return
            data = base64.b64encode(receiver.secrets[name].encode()).decode()
            self._answer(200, {"name": name, "payload": {"data": data}})

        def _answer(self, code: int, content: dict[str, Any]) -> None:
            data = json.dumps(content).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(data)))
            if code == 302:
                self.send_header("Location", f"{receiver.endpoint}/elsewhere")
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            """Printing requests would drown the tests' output."""

    return Handler
