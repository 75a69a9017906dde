"""Removes metadata from JPEG and PNG files without touching the compressed pixels.

EXIF and XMP contain the place (GPS), the camera and its owner, which must not be passed on with shards. Colour profiles
and everything a decoder needs are kept.
"""

from __future__ import annotations

import struct

# JPEG (ITU-T T.81, Annex B): APP1 is EXIF and XMP, APP13 Photoshop and IPTC, and COM a comment.
JPEG_DROPPED = {0xE1, 0xED, 0xFE}
JPEG_WITHOUT_LENGTH = {0x00, 0x01, 0xFF, *range(0xD0, 0xDA)}
PICTURE_INDEX = b"MPF\0"  # in APP2: offsets of further images, wrong once a segment is removed
JPEG_START, JPEG_SCAN = 0xD8, 0xDA
# PNG (W3C, third edition, 11.3): text, time and EXIF.
PNG_DROPPED = {b"tEXt", b"zTXt", b"iTXt", b"eXIf", b"tIME"}
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def without_metadata(data: bytes) -> bytes:
    """The same image without metadata; unchanged if its structure is unusual."""
    if data.startswith(PNG_SIGNATURE):
        return _png(data)
    return _jpeg(data) if data.startswith(bytes([0xFF, JPEG_START])) else data


def _jpeg(data: bytes) -> bytes:
    """Filter the segments before the first scan, after which the pixels come."""
    kept, at = [data[:2]], 2
    while True:
        if data[at : at + 1] != b"\xff" or at + 4 > len(data) or data[at + 1] in JPEG_WITHOUT_LENGTH:
            return data
        marker = data[at + 1]
        if marker == JPEG_SCAN:
            return b"".join([*kept, data[at:]])
        stop = at + 2 + struct.unpack(">H", data[at + 2 : at + 4])[0]
        if marker not in JPEG_DROPPED and data[at + 4 : at + 8] != PICTURE_INDEX:
            kept.append(data[at:stop])
        at = stop


def _png(data: bytes) -> bytes:
    kept, at = [PNG_SIGNATURE], len(PNG_SIGNATURE)
    while at < len(data):
        if at + 12 > len(data):
            return data
        stop = at + 12 + struct.unpack(">I", data[at : at + 4])[0]
        kind = data[at + 4 : at + 8]
        if kind not in PNG_DROPPED:
            kept.append(data[at:stop])
        if kind == b"IEND":
            return b"".join(kept)
        at = stop
    return data
