"""WebDataset tars of a tiny picture and a text of a few words, no two alike."""

from __future__ import annotations

import io
import tarfile
import zlib
from pathlib import Path

TAR_RECORDS = 10_000
SIDE_PIXELS = 8
WORDS = ("red", "green", "blue", "small", "large", "round", "square", "old", "new", "bright")


def write_tars(folder: Path, records: int) -> None:
    folder.mkdir(parents=True)
    for start in range(0, records, TAR_RECORDS):
        with tarfile.open(folder / f"{start // TAR_RECORDS:06d}.tar", "w") as tar:
            for number in range(start, min(records, start + TAR_RECORDS)):
                for suffix, data in (("png", tiny_png(number)), ("txt", text(number).encode())):
                    info = tarfile.TarInfo(f"{number:09d}.{suffix}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))


def text(number: int) -> str:
    return " ".join(WORDS[int(digit)] for digit in str(number)) + f" thing, number {number}"


def tiny_png(number: int) -> bytes:
    """A grey picture whose first pixels spell the number (PNG, W3C, third edition)."""
    pixels = number.to_bytes(8, "big").ljust(SIDE_PIXELS * SIDE_PIXELS, b"\x80")
    lines = b"".join(b"\0" + pixels[at : at + SIDE_PIXELS] for at in range(0, len(pixels), SIDE_PIXELS))
    header = SIDE_PIXELS.to_bytes(4, "big") * 2 + bytes([8, 0, 0, 0, 0])
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")
