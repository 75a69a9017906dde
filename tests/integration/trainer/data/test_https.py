"""Images are fetched over HTTPS from machines with a certificate that is trusted, is theirs, and has not ended."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.support.data.certificates import Authority
from tests.support.data.prepared import conversation, job_config, png, run_prepare
from tests.support.data.web_server import HOST, Answer, WebServer, web_server
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.data.fetching import web_address
from vlmpipe.trainer.errors import DataError, ExitCode

NAME, ROWS = "images.test", 3


@pytest.fixture
def authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Authority:
    """It is trusted, and every name means this machine, which counts as public."""
    made = Authority.new(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(made.file))
    monkeypatch.setattr(web_address, "is_public", lambda ip: ip == HOST)

    def resolve(host: str, port: int, **more: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (HOST, port))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    return made


def config_of(folder: Path, web: WebServer) -> JobConfig:
    """A run whose records name images of a server."""
    rows = []
    for number in range(ROWS):
        address = web.says(f"/{number}.png", Answer(png(number))).replace(HOST, NAME)
        talk = conversation("<image>\nWhich?", f"No. {number}.")
        rows.append({"id": number, "image": address, "conversations": talk})
    source = folder / "set.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return job_config(folder / "root", source=str(source), fetch=True, validation_fraction=0)


def test_images_come_over_https(tmp_path: Path, authority: Authority) -> None:
    named: list[str] = []
    tls = authority.server(NAME)
    tls.sni_callback = lambda connection, name, context: named.append(name)
    with web_server(tls) as web:
        prepared = run_prepare(config_of(tmp_path, web))
    assert prepared.counts["accepted"] == prepared.counts["images"] == ROWS
    assert named == [NAME] * ROWS and set(web.asked.values()) == {1}


REFUSED = {
    "another name": "Hostname mismatch, certificate is not valid for 'images.test'",
    "ended": "certificate has expired",
    "another authority": "unable to get local issuer certificate",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_other_certificates_are_refused_and_asked_again_by_the_next_run(
    tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    with monkeypatch.context() as patched:
        if kind == "another authority":
            (tmp_path / "other").mkdir()
            patched.setenv("SSL_CERT_FILE", str(Authority.new(tmp_path / "other").file))
        tls = authority.server("other.test" if kind == "another name" else NAME, days_left=-1 if kind == "ended" else 1)
        with web_server(tls) as web, pytest.raises(DataError) as found:
            run_prepare(config_of(tmp_path, web))
    assert found.value.code == ExitCode.DATA and not web.asked
    (report,) = (tmp_path / "root").rglob("fetched.json")
    failed = json.loads(report.read_text())["failed"]
    assert failed == {f"has a certificate that is refused: {REFUSED[kind]}": ROWS}
    assert "/0.png is not fetched; fetched.json of a run that asked for it says why" in str(found.value)
    assert not list((tmp_path / "root").rglob("failed/*")), "certificates are renewed"


def test_an_image_of_https_is_not_taken_from_http(tmp_path: Path, authority: Authority) -> None:
    with web_server(authority.server(NAME)) as web, web_server() as plain:
        config = config_of(tmp_path, web)
        place = plain.says("/0.png", Answer(png(0)))
        web.says("/0.png", Answer(status=302, headers={"Location": place}))
        with pytest.raises(DataError, match="redirects from https to http"):
            run_prepare(config)
    assert not plain.asked
