"""The HTTP server of the rehearsal's services."""

from __future__ import annotations

import http.client
import threading

import pytest

from vlmpipe.rehearsal.http_server import Handler, LocalServer

CLIENTS = 5


class Echo(Handler):
    def respond(self, body: bytes) -> None:
        self.send(200, {"Content-Length": str(len(body))})
        self.wfile.write(body)


def test_closing_ends_the_threads_of_connections_that_clients_keep_alive(capfd: pytest.CaptureFixture[str]) -> None:
    before = set(threading.enumerate())
    clients: list[http.client.HTTPConnection] = []
    with LocalServer(Echo) as server:
        for number in range(CLIENTS):
            clients.append(http.client.HTTPConnection(server.endpoint.removeprefix("http://"), timeout=20))
            clients[-1].request("POST", f"/{number}", body=b"text")
            assert clients[-1].getresponse().read() == b"text"
        handlers = set(threading.enumerate()) - before
        assert len(handlers) == CLIENTS + 1
    for thread in handlers:
        thread.join(timeout=20)
        assert not thread.is_alive()
    for client in clients:
        client.close()
    assert capfd.readouterr().err == ""
