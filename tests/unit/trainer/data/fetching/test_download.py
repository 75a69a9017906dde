"""A download is whole, bounded in bytes and time, and from the machine that was checked; or says why it is not."""

from __future__ import annotations

import socket
import time
from typing import Any

import pytest

from tests.support.data.prepared import png
from tests.support.data.web_server import HOST, Answer, WebServer
from vlmpipe.trainer.data.fetching import download as module
from vlmpipe.trainer.data.fetching.download import Downloader, DownloadError, with_retries

IMAGE = png(1)
DOWNLOAD = Downloader(max_bytes=10_000, whole_s=0.6, silence_s=0.3)
OK = Answer(IMAGE)


def to(place: str, status: int = 302) -> Answer:
    return Answer(status=status, headers={"Location": place})


@pytest.mark.parametrize(
    "answer", [OK, Answer(IMAGE, chunked=True), Answer(IMAGE, headers={"Content-Type": "application/octet-stream"}),
               Answer(IMAGE, headers={}), Answer(IMAGE, headers={"Content-Type": "image/jpeg; q=1"})],
)  # fmt: skip
def test_an_image_is_downloaded_whole(web: WebServer, answer: Answer) -> None:
    assert DOWNLOAD(web.says("/ä b.png?x=1".replace("ä b", "%C3%A4%20b"), answer)) == IMAGE


def test_redirects_are_followed_to_a_bound(web: WebServer) -> None:
    last = web.says("/last", OK)
    for number in range(6):
        last = web.says(
            f"/{number}", to(f"/{number - 1}" if number else "/last", (301, 302, 303, 307, 308)[number % 5])
        )
    with pytest.raises(DownloadError, match="redirects more than 5 times") as found:
        DOWNLOAD(last)
    assert found.value.is_final
    assert DOWNLOAD(last.replace("/5", "/4")) == IMAGE


@pytest.mark.parametrize(
    "place", ["/%C3%A4%E2%80%9C.png", "/ä“.png".encode().decode("latin-1")], ids=["escaped", "raw"]
)
def test_a_redirect_to_any_script_is_followed(web: WebServer, place: str) -> None:
    web.says("/%C3%A4%E2%80%9C.png", OK)
    assert DOWNLOAD(web.says("/1.png", to(place))) == IMAGE


FINAL = {
    "404 Not Found": Answer(status=404),
    "410 Gone": Answer(status=410),
    "403 Forbidden": Answer(status=403),
    "206 Partial Content": Answer(IMAGE, status=206),
    "304 Not Modified": Answer(status=304),
    "302 Found": Answer(status=302, headers={}),
    "is text/html, no image": Answer(b"<html>", headers={"Content-Type": "text/html; charset=x"}),
    "is compressed": Answer(IMAGE, headers={"Content-Encoding": "gzip", "Content-Type": "image/png"}),
    "has no bytes": Answer(b""),
    "10.0.0.1 is 10.0.0.1, which is no public address": to("http://10.0.0.1/1.png"),
    "169.254.169.254, which is no public": to("http://169.254.169.254/computeMetadata/v1/"),
    "no address of http or https": to("file:///etc/passwd"),
}
TEMPORARY = {  # a later run may have another bound, too
    "has more than 10000 bytes": Answer(b"x" * 10_001),
    "has more than 10000 bytes ": Answer(b"x" * 10_001, chunked=True),
    "has more than 10000 bytes  ": Answer(b"x", length=1 << 40),
    "500 Internal Server Error": Answer(status=500),
    "429 Too Many Requests": Answer(status=429),
    "503 Service Unavailable": Answer(status=503),
    "cannot be read: IncompleteRead": Answer(IMAGE, length=len(IMAGE) + 9),
    "takes too long": Answer(IMAGE, drip_s=0.05),
    "takes too long ": Answer(IMAGE, drip_s=0.5),
}


@pytest.mark.parametrize("reason", [*FINAL, *TEMPORARY])
def test_what_is_no_whole_image_is_named(web: WebServer, reason: str) -> None:
    address = web.says("/1.png", FINAL.get(reason) or TEMPORARY[reason])
    start_s = time.monotonic()
    with pytest.raises(DownloadError, match=reason.strip()) as found:
        DOWNLOAD(address)
    assert found.value.is_final == (reason in FINAL)
    assert time.monotonic() - start_s < 5.0, "a bound on time has to hold"


def test_the_machine_that_was_checked_is_asked(web: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name means another machine as soon as it was checked, as names of attackers do."""
    asked = []

    def resolve(host: str, port: int, **more: Any) -> list[Any]:
        asked.append(host)
        ip = HOST if len(asked) == 1 else "10.0.0.1"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, port))]

    address = web.says("/1.png", OK).replace(HOST, "images.test")
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert DOWNLOAD(address) == IMAGE
    assert asked == ["images.test"]
    with pytest.raises(DownloadError, match=r"images.test is 10.0.0.1, which is no public address"):
        DOWNLOAD(address)


def test_nothing_is_asked_of_this_machine(web: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    address = web.says("/1.png", OK)
    monkeypatch.undo()
    with pytest.raises(DownloadError, match=r"127.0.0.1, which is no public address") as found:
        DOWNLOAD(address)
    assert found.value.is_final and not web.asked


def test_a_proxy_of_the_environment_is_not_asked(web: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://10.0.0.1:1")
    assert DOWNLOAD(web.says("/1.png", OK)) == IMAGE


def test_servers_that_are_busy_are_asked_again_after_growing_waits(web: WebServer) -> None:
    waits: list[float] = []
    busy = Answer(status=429, headers={"Retry-After": "7"})
    address = web.says("/1.png", Answer(status=500), busy, Answer(status=503), OK)
    assert with_retries(DOWNLOAD, address, sleep=waits.append) == IMAGE
    assert waits == [0.5, 7.0, 2.0] and web.asked["/1.png"] == 4


@pytest.mark.parametrize(
    ("answer", "tries"), [(Answer(status=404), 1), (Answer(status=500), 4), (Answer(b"x" * 10_001), 1)]
)
def test_only_what_may_change_is_asked_again(web: WebServer, answer: Answer, tries: int) -> None:
    with pytest.raises(DownloadError):
        with_retries(DOWNLOAD, web.says("/1.png", answer), sleep=lambda _: None)
    assert web.asked["/1.png"] == tries


def test_a_wait_that_a_server_asks_for_is_bounded() -> None:
    assert DownloadError("429", is_final=False, wait_s=1e9).wait_s == module.LONGEST_WAIT_S


def test_a_host_without_an_address_is_asked_once_in_a_run() -> None:
    with pytest.raises(DownloadError, match="a host without an address") as found:
        with_retries(DOWNLOAD, "http://nowhere.invalid/1.png", sleep=lambda _: pytest.fail("waits"))
    assert not found.value.is_final
