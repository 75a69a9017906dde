"""A strict web server on this machine: answers as it is told, and notes requests that no downloader should send."""

from __future__ import annotations

import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HOST = "127.0.0.1"


@dataclass
class Answer:
    """What a path answers."""

    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=lambda: {"Content-Type": "image/png"})
    length: int | None = None  # that is promised; None: the body's
    drip_s: float = 0.0  # before each byte
    chunked: bool = False


@dataclass
class WebServer:
    """`answers`: by path, in the order of the requests; the last one is repeated. `odd`: what was wrong with them."""

    port: int
    is_encrypted: bool = False
    answers: dict[str, list[Answer]] = field(default_factory=dict)
    asked: Counter[str] = field(default_factory=Counter)
    odd: list[str] = field(default_factory=list)

    def says(self, path: str, *answers: Answer) -> str:
        """The address of a path that answers so."""
        self.answers[path] = list(answers)
        return f"http{'s' if self.is_encrypted else ''}://{HOST}:{self.port}{path}"

    def next_answer(self, path: str) -> Answer:
        number = self.asked[path]
        self.asked[path] += 1
        answers = self.answers.get(path)
        return answers[min(number, len(answers) - 1)] if answers else Answer(b"not here", 404)


def _handler(server: Callable[[], WebServer]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            web = server()
            self._check(web)
            answer = web.next_answer(self.path)
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                self.send_header(name, value)
            if answer.chunked:
                self.send_header("Transfer-Encoding", "chunked")
            else:
                self.send_header("Content-Length", str(len(answer.body) if answer.length is None else answer.length))
            self.end_headers()
            self.close_connection = True
            try:
                self._send(answer)
            except OSError:
                return  # the client has had enough

        def _send(self, answer: Answer) -> None:
            if answer.chunked:
                self.wfile.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(answer.body), answer.body))
            elif answer.drip_s:
                for byte in answer.body:
                    time.sleep(answer.drip_s)
                    self.wfile.write(bytes([byte]))
            else:
                self.wfile.write(answer.body)

        def _check(self, web: WebServer) -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            if len(headers) != len(self.headers.items()):
                web.odd.append(f"repeated headers: {self.headers.items()}")
            if not headers.get("host", "").endswith(f":{web.port}"):
                web.odd.append(f"Host: {headers.get('host')}")
            if headers.get("accept-encoding") != "identity":
                web.odd.append(f"Accept-Encoding: {headers.get('accept-encoding')}")
            if secrets := headers.keys() & {"authorization", "cookie", "referer", "proxy-authorization"}:
                web.odd.append(f"sends {', '.join(secrets)}")
            if not self.path.isascii() or " " in self.path or "#" in self.path:
                web.odd.append(f"asks for {self.path!r}")

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    return Handler


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    tls: ssl.SSLContext | None = None

    def finish_request(self, request: Any, client_address: Any) -> None:
        """In the request's thread, so that a client which refuses the certificate stops nobody else."""
        try:
            served = self.tls.wrap_socket(request, server_side=True) if self.tls else request
        except (ssl.SSLError, OSError):
            return
        super().finish_request(served, client_address)


@contextmanager
def web_server(tls: ssl.SSLContext | None = None) -> Iterator[WebServer]:
    """Serve within the block, encrypted with `tls`; afterwards no request may have been odd."""
    web: WebServer
    http = _Server((HOST, 0), _handler(lambda: web))
    http.tls = tls
    web = WebServer(http.server_address[1], tls is not None)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield web
        assert web.odd == []
    finally:
        http.shutdown()
        http.server_close()
        thread.join()
