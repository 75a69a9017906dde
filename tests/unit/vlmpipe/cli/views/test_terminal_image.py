"""Images in terminals that say they can, by their own answers; no others are written to."""

from __future__ import annotations

import base64
import io
import os
import pty
import re
import select
import threading
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from PIL import Image

from vlmpipe.cli.views import terminal_image
from vlmpipe.cli.views.terminal_image import encoded, protocol_of, show_image
from vlmpipe.trainer.errors import DataError

DA1, WITH_SIXELS = b"\x1b[?62;22c", b"\x1b[?62;4;22c"
KITTY, WEZTERM = b"\x1b_Gi=31;OK\x1b\\", b"\x1bP>|WezTerm 2026\x1b\\"
RED = (255, 0, 0)


@contextmanager
def terminal(answer: bytes) -> Iterator[tuple[int, list[bytes]]]:
    """A terminal that answers the questions, and all that was written to it."""
    master, slave = pty.openpty()
    tty.setraw(slave)
    written: list[bytes] = []
    is_over = threading.Event()

    def serve() -> None:
        has_answered = False
        while not is_over.is_set() or select.select([master], [], [], 0)[0]:
            if select.select([master], [], [], 0.02)[0]:
                written.append(os.read(master, 65536))
                if not has_answered and b"\x1b[c" in b"".join(written):
                    has_answered = True
                    for byte in answer:  # as a slow line would
                        os.write(master, bytes([byte]))

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield slave, written
    finally:
        is_over.set()
        thread.join()
        os.close(slave)
        os.close(master)


@pytest.mark.parametrize(
    ("answer", "protocol"),
    [
        (KITTY + WEZTERM + WITH_SIXELS, "kitty"),
        (WEZTERM + WITH_SIXELS, "iterm2"),
        (b"\x1bP>|XTerm(390)\x1b\\" + WITH_SIXELS, "sixel"),
        (b"\x1b_Gi=31;EINVAL:no\x1b\\" + DA1, ""),
        (b"\x1b[?4;62c", ""),  # the level of a terminal, no attribute
        (b"", ""),
    ],
)
def test_the_terminal_says_what_it_can(answer: bytes, protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not answer:
        monkeypatch.setattr(terminal_image, "WAIT_S", 0.05)
    else:
        monkeypatch.setattr(terminal_image, "WAIT_S", 30.0)  # it ends with the answer
    with terminal(answer) as (slave, _):
        assert protocol_of(slave, slave) == protocol


def test_an_image_is_drawn_small_and_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.new("RGB", (1920, 1440), RED).save(tmp_path / "a.png")
    monkeypatch.setattr(terminal_image, "WAIT_S", 30.0)
    with terminal(KITTY + DA1) as (slave, written):
        stream = os.fdopen(os.dup(slave), "r+b", buffering=0)
        monkeypatch.setattr("sys.stdin", stream)
        monkeypatch.setattr("sys.stdout", stream)
        assert show_image(tmp_path / "a.png")
        (tmp_path / "b.png").write_bytes(b"no image")
        monkeypatch.setattr(terminal_image, "protocol_of", lambda _keyboard, _screen: "kitty")
        with pytest.raises(DataError, match=r"b\.png is no image"):
            show_image(tmp_path / "b.png")
    chunks = re.findall(rb"\x1b_G[^;]*m=[01];([^\x1b]*)\x1b", b"".join(written))
    drawn = Image.open(io.BytesIO(base64.b64decode(b"".join(chunks))))
    assert drawn.size == (480, 360) and drawn.getpixel((0, 0)) == RED


def test_nothing_is_written_where_there_is_no_terminal(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert not show_image(tmp_path / "a.png")
    assert capfd.readouterr().out == ""


def test_sixels_are_the_pixels() -> None:
    """Read back as a terminal does: colours by number, six rows a character."""
    image = Image.new("RGB", (20, 13), RED)
    image.paste((0, 0, 255), (5, 7, 12, 13))
    text = encoded(image, "sixel").decode()
    body = text.removeprefix("\x1bP").removesuffix("\x1b\\")
    colours = {int(n): tuple(map(int, rgb.split(";"))) for n, rgb in re.findall(r"#(\d+);2;([\d;]+)", body)}
    seen = Image.new("RGB", image.size)
    top = 0
    for band in re.sub(r'^q"[\d;]+(#\d+;2;[\d;]+)+', "", body).split("-")[:-1]:
        for line in filter(None, band.split("$")):
            number, columns = re.match(r"#(\d+)(.*)", line).groups()
            columns = re.sub(r"!(\d+)(.)", lambda found: found[2] * int(found[1]), columns)
            for x, character in enumerate(columns):
                for y in (y for y in range(6) if ord(character) - 63 >> y & 1):
                    seen.putpixel((x, top + y), tuple(round(value * 2.55) for value in colours[int(number)]))
        top += 6
    assert seen.tobytes() == image.tobytes()
