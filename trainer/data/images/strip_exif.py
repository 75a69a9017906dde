"""Removes metadata from JPEG, PNG and WebP files without touching the compressed pixels.

EXIF and XMP contain the place (GPS), the camera and its owner, which must not be passed on with shards. So only parts
from closed lists are kept: what a decoder needs, and colour profiles. What follows the end of an image, such as the
video of a motion photo or the second image of an MPO, is not.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterator

# JPEG (ITU-T T.81, Annex B): frames, tables, restart intervals and scans. Of application data, JFIF's header without
# its thumbnail (ITU-T T.871, 10.1), the colour transform (T.872, 6.5.3) and the profile (ICC.1, Annex B.4).
JPEG_KEPT = {*range(0xC0, 0xC8), *range(0xC9, 0xD0), *range(0xDA, 0xE0)}
JPEG_WITHOUT_LENGTH = {0x00, 0x01, *range(0xD0, 0xD9)}
JPEG_START, JPEG_END, JPEG_SCAN, JPEG_APP0 = 0xD8, 0xD9, 0xDA, 0xE0
JFIF, JFIF_BYTES = b"JFIF\0", 16  # without a thumbnail, and with the two bytes of its length
KEPT_DATA = {0xE2: b"ICC_PROFILE\0", 0xEE: b"Adobe"}
MARKER = re.compile(
    rb"\xff\xff*([^\x00\xff\xd0-\xd7])", re.DOTALL
)  # after a scan's bytes; its first byte as a literal is found 16 times faster
# PNG (W3C, third edition, 11): pixels, and how their values are shown.
PNG_KEPT = {
    b"IHDR", b"PLTE", b"IDAT", b"IEND", b"tRNS", b"gAMA", b"cHRM", b"sRGB", b"iCCP", b"sBIT", b"bKGD", b"hIST", b"pHYs",
    b"sPLT", b"cICP", b"mDCV", b"cLLI",
}  # fmt: skip
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
# WebP (RFC 9649, 2.7): chunks, and the bits of VP8X that announce what else there is.
WEBP_KEPT = {b"VP8X", b"VP8 ", b"VP8L", b"ALPH", b"ICCP"}
WEBP_ICC, WEBP_ALPHA = 0x20, 0x10


def without_metadata(data: bytes) -> bytes | None:
    """Return the image without metadata, or None if its structure is not that of its format."""
    if data.startswith(PNG_SIGNATURE):
        return _png(data)
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return _webp(data)
    return _jpeg(data) if data.startswith(bytes([0xFF, JPEG_START])) else None


def damaged_chunk(data: bytes) -> str:
    """The first chunk of a PNG whose bytes have another CRC32 than it names; "" for other files.

    Decoders pass over the checksums of pixels.
    """
    if not data.startswith(PNG_SIGNATURE):
        return ""
    for kind, chunk in _png_chunks(data):
        if kind in PNG_KEPT and zlib.crc32(chunk[4:-4]) != struct.unpack(">I", chunk[-4:])[0]:
            return kind.decode()
    return ""


def _jpeg(data: bytes) -> bytes | None:
    """Filter the segments up to the end of the image. Any number of fill bytes may stand before a marker."""
    parts, at = [data[:2]], 2
    while True:
        while data[at + 1 : at + 2] == b"\xff":
            at += 1
        if data[at : at + 1] != b"\xff" or at + 2 > len(data):
            return None
        marker = data[at + 1]
        if marker == JPEG_END:
            return b"".join([*parts, data[at : at + 2]])
        if marker in JPEG_WITHOUT_LENGTH or at + 4 > len(data):
            return None
        stop = at + 2 + int(struct.unpack(">H", data[at + 2 : at + 4])[0])
        if marker == JPEG_SCAN:  # to the next marker that ends its bytes
            following = MARKER.search(data, stop)
            if following is None:
                return None
            stop = following.start()
        segment = data[at:stop]
        if marker == JPEG_APP0 and segment[4:].startswith(JFIF) and len(segment) >= 2 + JFIF_BYTES:
            parts.append(segment[:2] + struct.pack(">H", JFIF_BYTES) + segment[4:JFIF_BYTES] + bytes(2))
        elif marker in JPEG_KEPT or (marker in KEPT_DATA and segment[4:].startswith(KEPT_DATA[marker])):
            parts.append(segment)
        at = stop


def _png(data: bytes) -> bytes | None:
    parts = [PNG_SIGNATURE]
    for kind, chunk in _png_chunks(data):
        if kind in PNG_KEPT:
            parts.append(chunk)
        if kind == b"IEND":
            return b"".join(parts) if len(chunk) == 12 else None
    return None


def _png_chunks(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The whole chunks in order: kind, and length, kind, content and checksum together."""
    at = len(PNG_SIGNATURE)
    while at + 12 <= len(data):
        stop = at + 12 + struct.unpack(">I", data[at : at + 4])[0]
        if stop > len(data):
            return
        yield data[at + 4 : at + 8], data[at:stop]
        at = stop


def _webp(data: bytes) -> bytes | None:
    parts, at = [], 12
    end = min(len(data), 8 + int(struct.unpack("<I", data[4:8])[0]))
    while at + 8 <= end:
        kind, size = data[at : at + 4], int(struct.unpack("<I", data[at + 4 : at + 8])[0])
        stop = at + 8 + size + size % 2
        if stop > end:
            return None
        chunk = data[at:stop]
        if kind == b"VP8X":
            if size < 10:
                return None
            chunk = chunk[:8] + bytes([chunk[8] & (WEBP_ICC | WEBP_ALPHA)]) + chunk[9:]
        if kind in WEBP_KEPT:
            parts.append(chunk)
        at = stop
    content = b"WEBP" + b"".join(parts)
    return b"RIFF" + struct.pack("<I", len(content)) + content
