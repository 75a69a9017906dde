"""Shows an image in terminals that say they can: by kitty's protocol, iTerm2's or as sixels. Elsewhere it shows none.

Protocols: https://sw.kovidgoyal.net/kitty/graphics-protocol, https://iterm2.com/documentation-images.html, and the
VT330's manual for sixels (DEC EK-VT3XX-GP). All are asked about in one write, and every terminal answers the last
question (DA1).
"""

from __future__ import annotations

import base64
import io
import os
import re
import select
import sys
import termios
import time
import tty
from pathlib import Path
from typing import Literal

from PIL import Image, UnidentifiedImageError

from vlmpipe.trainer.errors import DataError, UserError, os_errors

Protocol = Literal["kitty", "iterm2", "sixel", ""]
WAIT_S = 0.5  # for answers: a terminal across a network takes a moment
MAX_PIXELS = (480, 360)  # width and height of what is shown
SIXEL_COLOURS = 64
CHUNK = 4096  # bytes of base64 that kitty takes at once
QUESTIONS = b"\x1b_Gi=31,s=1,v=1,a=q,t=d,f=24;AAAA\x1b\\" + b"\x1b[>q" + b"\x1b[c"
DA1 = re.compile(rb"\x1b\[\?([0-9;]*)c")
NAMED = re.compile(rb"\x1bP>\|([^\x1b]*)\x1b\\")  # XTVERSION
AS_ITERM2 = (b"iTerm2", b"WezTerm", b"mintty")  # names of terminals that draw iTerm2's images


def show_image(path: Path) -> bool:
    """Show the image where standard input and output are a terminal that can; whether it was shown.

    Raises DataError for a file that is no image, UserError for one that cannot be read.
    """
    try:
        handles = sys.stdin.fileno(), sys.stdout.fileno()
        are_terminals = all(map(os.isatty, handles))
    except (ValueError, OSError):  # no files, as in a notebook
        return False
    protocol = protocol_of(*handles) if are_terminals else ""
    if not protocol:
        return False
    try:
        with os_errors(f"reading {path}"), path.open("rb") as file, Image.open(file) as image:
            image.draft("RGB", MAX_PIXELS)
            small = image.convert("RGB")
    except UserError as error:
        if isinstance(error.__cause__, UnidentifiedImageError):
            raise DataError(f"{path} is no image", expected="a JPEG, PNG or WebP file") from error
        raise
    small.thumbnail(MAX_PIXELS)
    sys.stdout.flush()
    # Past the stream, which takes control characters out of texts: these are our own.
    _write(handles[1], encoded(small, protocol) + b"\n")
    return True


def protocol_of(keyboard: int, screen: int) -> Protocol:
    """Image protocol that the terminal says it draws; nothing where it does not answer within WAIT_S."""
    before = termios.tcgetattr(keyboard)
    try:
        tty.setcbreak(keyboard, termios.TCSANOW)
        _write(screen, QUESTIONS)
        answer, until_s = b"", time.monotonic() + WAIT_S
        while not DA1.search(answer) and (left_s := until_s - time.monotonic()) > 0:
            if select.select([keyboard], [], [], left_s)[0]:
                answer += os.read(keyboard, 4096)
    finally:
        termios.tcsetattr(keyboard, termios.TCSANOW, before)
    named, attributes = NAMED.search(answer), DA1.search(answer)
    if b"\x1b_Gi=31;OK" in answer:
        return "kitty"
    if named and named[1].startswith(AS_ITERM2):
        return "iterm2"
    return "sixel" if attributes and b"4" in attributes[1].split(b";")[1:] else ""


def encoded(image: Image.Image, protocol: Protocol) -> bytes:
    """The control sequences that draw the image, of mode RGB."""
    if protocol == "sixel":
        return sixels(image)
    file = io.BytesIO()
    image.save(file, "PNG")
    data = base64.b64encode(file.getvalue())
    if protocol == "iterm2":
        return b"\x1b]1337;File=inline=1;size=%d:%s\x07" % (len(file.getvalue()), data)
    chunks = [data[start : start + CHUNK] for start in range(0, len(data), CHUNK)]
    heads = [b"a=T,f=100,q=2,", *[b""] * (len(chunks) - 1)]
    more = [1] * (len(chunks) - 1) + [0]
    return b"".join(b"\x1b_G%sm=%d;%s\x1b\\" % part for part in zip(heads, more, chunks, strict=True))


def sixels(image: Image.Image) -> bytes:
    """The image as sixels: bands of six lines, drawn once for each of their colours."""
    indexed = image.quantize(SIXEL_COLOURS)
    palette, (width, height) = indexed.getpalette() or [], indexed.size
    pixels = indexed.tobytes()
    parts = [f'\x1bPq"1;1;{width};{height}']
    for number in sorted(set(pixels)):
        red, green, blue = (round(value * 100 / 255) for value in palette[3 * number : 3 * number + 3])
        parts.append(f"#{number};2;{red};{green};{blue}")
    for top in range(0, height, 6):
        lines = [pixels[line * width : (line + 1) * width] for line in range(top, min(top + 6, height))]
        for number in sorted(set().union(*lines)):
            bits = [sum((line[x] == number) << y for y, line in enumerate(lines)) for x in range(width)]
            parts.append(f"#{number}{_repeated(bits)}$")
        parts.append("-")
    return "".join([*parts, "\x1b\\"]).encode("ascii")


def _repeated(bits: list[int]) -> str:
    """Columns of six pixels as characters, runs of more than three as a number."""
    text = "".join(chr(63 + value) for value in bits)
    return re.sub(r"(.)\1{3,}", lambda match: f"!{len(match[0])}{match[1]}", text)


def _write(handle: int, data: bytes) -> None:
    while data:
        data = data[os.write(handle, data) :]
