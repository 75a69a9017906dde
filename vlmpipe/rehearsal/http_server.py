"""HTTP server on localhost that the rehearsal's services share, with a request log and a lock."""

from __future__ import annotations

import contextlib
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit


class ApiError(Exception):
    """An answer other than 200. `reason` is that of Google's ErrorInfo, such as SERVICE_DISABLED."""

    def __init__(self, code: int, message: str, *, reason: str = "", headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.reason, self.headers = code, message, reason, headers or {}


class ConnectionServer(ThreadingHTTPServer):
    """Ends the connections that clients keep alive when it closes, and with them their threads."""

    daemon_threads = True

    def __init__(self, handler: type[BaseHTTPRequestHandler]) -> None:
        self._connections: set[socket.socket] = set()
        super().__init__(("127.0.0.1", 0), handler)

    def process_request(self, request: socket.socket | tuple[bytes, socket.socket], client_address: object) -> None:
        assert isinstance(request, socket.socket)  # the other form is of datagrams
        self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: socket.socket | tuple[bytes, socket.socket]) -> None:
        assert isinstance(request, socket.socket)
        self._connections.discard(request)
        super().shutdown_request(request)

    def server_close(self) -> None:
        super().server_close()
        for connection in list(self._connections):
            with contextlib.suppress(OSError):  # the client, or its thread, has just closed it
                connection.shutdown(socket.SHUT_RDWR)


class HttpServer:
    """Serves inside its `with` block, one thread a connection, on a free port."""

    def __init__(self, handler: type[BaseHTTPRequestHandler]) -> None:
        self._server = ConnectionServer(handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"


class LocalServer(HttpServer):
    """Serves from memory. `lock` is held while a request takes effect."""

    def __init__(self, handler: type[Handler]) -> None:
        super().__init__(type(handler.__name__, (handler,), {"fake": self}))
        self.requests: list[str] = []  # "METHOD path?query" of every request that arrived
        self.lock = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    """Reads a request and hands its body to `respond`."""

    fake: Any
    protocol_version = "HTTP/1.1"  # keep-alive, as the real services
    disable_nagle_algorithm = True  # otherwise each answer waits 40 ms for the client's delayed ACK

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.fake.requests.append(f"{self.command} {self.path}")
        self.respond(body)

    do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = _serve

    def respond(self, body: bytes) -> None:
        raise NotImplementedError

    def path_and_query(self) -> tuple[str, dict[str, str]]:
        """The path, and the first value of each query parameter."""
        url = urlsplit(self.path)
        return url.path, {key: values[0] for key, values in parse_qs(url.query, keep_blank_values=True).items()}

    def send(self, code: int, headers: dict[str, str]) -> None:
        """Send the status line and the headers."""
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is printed: `requests` has every request."""
