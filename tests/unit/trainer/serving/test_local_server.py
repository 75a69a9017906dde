"""The port of a server on this machine: it must be free, and what answers there must be the server."""

from __future__ import annotations

import http.server
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.trainer.tiny_runs import TINY, merged
from vlmpipe.rehearsal.http_server import HttpServer
from vlmpipe.trainer import secret_manager
from vlmpipe.trainer.errors import ExitCode, UserError
from vlmpipe.trainer.serving import local_server
from vlmpipe.trainer.serving.local_server import LocalServer, require_free_port, serving
from vlmpipe.trainer.storage.local import LocalStorage
from vlmpipe.trainer.storage.records import write_record

SECRET = "projects/p/secrets/hub"


@pytest.fixture
def other() -> Iterator[int]:
    """The port of another program, which says that it is well."""

    class Healthy(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    with HttpServer(Healthy) as server:
        yield int(server.endpoint.rpartition(":")[2])


def test_a_port_in_use_is_refused_before_the_model_is_loaded(
    other: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=f"port {other} of this machine cannot be used") as refused:
        require_free_port(other)
    assert refused.value.code == ExitCode.UNAVAILABLE and "--port 0" in refused.value.fix
    require_free_port(0)
    monkeypatch.setattr(local_server, "require_package", lambda module: None)
    monkeypatch.setattr(local_server, "require_whole_export", lambda *_: {})
    with pytest.raises(UserError, match="cannot be used"), serving(str(tmp_path), port=other):
        pass


def test_a_whole_export_is_served_without_the_hubs_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = merged(TINY, {"run": {"run_id": "r", "root_uri": str(tmp_path)}, "model.hub_token_secret": SECRET})
    write_record(LocalStorage(tmp_path), "run.json", content)

    def started(*_: object, **__: object) -> None:
        raise TimeoutError("this far")

    monkeypatch.setattr(secret_manager, "_read_for", lambda *_: pytest.fail("a secret is read"))
    monkeypatch.setattr(local_server, "require_package", lambda module: None)
    monkeypatch.setattr(local_server, "require_whole_export", lambda *_: {})
    monkeypatch.setattr(local_server.subprocess, "Popen", started)
    with pytest.raises(TimeoutError, match="this far"), serving(str(tmp_path)):
        pass


def test_another_program_that_answers_is_not_the_server(other: int, tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit('address already in use')"])
    (tmp_path / "log").write_text("address already in use")
    with pytest.raises(UserError, match="address already in use"):
        local_server._wait(process, other, tmp_path / "log")


def test_a_server_that_ends_by_itself_is_an_error() -> None:
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(0)"])
    with pytest.raises(UserError, match="ended with code 0"):
        LocalServer("http://x/v1", "m", process).wait()
