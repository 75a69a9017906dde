"""Removes metadata from JPEG, PNG and WebP files without touching the compressed pixels.

EXIF and XMP contain the place (GPS), the camera and its owner, which must not be passed on with shards. Colour profiles
and everything a decoder needs are kept. What follows the end of an image, such as the video of a motion photo, is not.
"""

from __future__ import annotations

import re
import struct

# JPEG (ITU-T T.81, Annex B): APP1 is EXIF and XMP, APP13 Photoshop and IPTC, and COM a comment.
JPEG_DROPPED = {0xE1, 0xED, 0xFE}
JPEG_WITHOUT_LENGTH = {0x00, 0x01, *range(0xD0, 0xD9)}
PICTURE_INDEX = b"MPF\0"  # in APP2: offsets of further images, wrong once a segment is removed
JPEG_START, JPEG_END, JPEG_SCAN = 0xD8, 0xD9, 0xDA
MARKER = re.compile(rb"\xff+([^\x00\xff\xd0-\xd7])", re.DOTALL)  # behind a scan's bytes
# PNG (W3C, third edition, 11.3): text, time and EXIF.
PNG_DROPPED = {b"tEXt", b"zTXt", b"iTXt", b"eXIf", b"tIME"}
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
# WebP (RFC 9649, 2.7): chunks, and the bits of VP8X that announce them.
WEBP_DROPPED = {b"EXIF": 0x08, b"XMP ": 0x04}


def without_metadata(data: bytes) -> bytes | None:
    """The same image without metadata; None if its structure is not that of its format."""
    if data.startswith(PNG_SIGNATURE):
        return _png(data)
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return _webp(data)
    return _jpeg(data) if data.startswith(bytes([0xFF, JPEG_START])) else None


def _jpeg(data: bytes) -> bytes | None:
    """Filter the segments up to the end of the image. Any number of fill bytes may stand before a marker."""
    kept, at = [data[:2]], 2
    while True:
        start = at
        while data[at + 1 : at + 2] == b"\xff":
            at += 1
        if data[at : at + 1] != b"\xff" or at + 2 > len(data):
            return None
        marker = data[at + 1]
        if marker == JPEG_END:
            return b"".join([*kept, data[at : at + 2]])
        if marker in JPEG_WITHOUT_LENGTH or at + 4 > len(data):
            return None
        stop = at + 2 + int(struct.unpack(">H", data[at + 2 : at + 4])[0])
        if marker == JPEG_SCAN:  # to the next marker that ends its bytes
            following = MARKER.search(data, stop)
            if following is None:
                return b"".join([*kept, data[start:]])  # some writers leave the end out
            stop = following.start()
        if marker not in JPEG_DROPPED and data[at + 4 : at + 8] != PICTURE_INDEX:
            kept.append(data[at:stop])
        at = stop


def _png(data: bytes) -> bytes | None:
    kept, at = [PNG_SIGNATURE], len(PNG_SIGNATURE)
    while at + 12 <= len(data):
        stop = at + 12 + struct.unpack(">I", data[at : at + 4])[0]
        kind = data[at + 4 : at + 8]
        if kind not in PNG_DROPPED:
            kept.append(data[at:stop])
        if kind == b"IEND":
            return b"".join(kept)
        at = stop
    return None


def _webp(data: bytes) -> bytes | None:
    kept, at = [], 12
    end = min(len(data), 8 + int(struct.unpack("<I", data[4:8])[0]))
    while at + 8 <= end:
        kind, size = data[at : at + 4], int(struct.unpack("<I", data[at + 4 : at + 8])[0])
        stop = at + 8 + size + size % 2
        if stop > end:
            return None
        chunk = data[at:stop]
        if kind == b"VP8X":
            chunk = chunk[:8] + bytes([chunk[8] & ~sum(WEBP_DROPPED.values())]) + chunk[9:]
        if kind not in WEBP_DROPPED:
            kept.append(chunk)
        at = stop
    content = b"WEBP" + b"".join(kept)
    return b"RIFF" + struct.pack("<I", len(content)) + content
