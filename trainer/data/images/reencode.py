"""Encodes a changed image again in the way of its file, so that a turned photograph takes no more space than before.

No library that is small and kept turns a JPEG's blocks without decoding them. With the quantization tables of the file,
transposed as the image is, most values fall on the same steps again: the file has the same size within a few percent
and loses little of what it still had.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Mapping
from typing import Any

from PIL import Image, JpegImagePlugin

from vlmpipe.trainer.data.sample import png_bytes

JPEG_QUALITY = WEBP_QUALITY = 95
BLOCK = 8  # pixels of a side
SIDEWAYS = {5, 6, 7, 8}  # EXIF orientations that exchange width and height
FULL, HALF_WIDTH, QUARTER = 0, 1, 2  # colour's resolution, as Pillow numbers it (4:4:4, 4:2:2, 4:2:0)
VP8L, FRAME = b"VP8L", b"ANMF"  # chunks of WebP (RFC 9649): lossless pixels, a frame of an animation
FRAME_HEADER_BYTES = 16


def reencoded(image: Image.Image, original: Image.Image, data: bytes, orientation: int = 1) -> tuple[bytes, str]:
    """The changed image as a file, and its extension: JPEG stays JPEG, WebP stays WebP, all others are PNG.

    Args:
        original: as it was opened from `data`.
        orientation: the file's EXIF orientation, if turning by it is all that was changed.
    """
    profile = {"icc_profile": original.info["icc_profile"]} if original.info.get("icc_profile") else {}
    buffer = io.BytesIO()
    if original.format in ("JPEG", "MPO"):
        image.save(buffer, "JPEG", **_jpeg_settings(image, original, orientation), **profile)
        return buffer.getvalue(), "jpg"
    if original.format == "WEBP":
        lossless = _is_lossless(data)
        image.save(buffer, "WEBP", **({"lossless": True} if lossless else {"quality": WEBP_QUALITY}), **profile)
        return buffer.getvalue(), "webp"
    return png_bytes(image), "png"


def _jpeg_settings(image: Image.Image, original: Any, orientation: int) -> dict[str, object]:
    """The quality of the file for an image that was only turned, and else a high one."""
    layers = getattr(original, "layer", ())
    tables: Mapping[int, Any] = getattr(original, "quantization", {})
    if orientation == 1 or image.mode != original.mode or not layers or not all(layer[3] in tables for layer in layers):
        return {"quality": JPEG_QUALITY, "subsampling": FULL}
    sampling = JpegImagePlugin.get_sampling(original)
    if orientation in SIDEWAYS and sampling == HALF_WIDTH:
        sampling = FULL  # halves of the height, which cannot be written
    of_layers = [_turned(list(tables[layer[3]]), orientation) for layer in layers]
    while len(of_layers) > 1 and of_layers[-1] == of_layers[-2]:  # the last table is of all further layers
        of_layers.pop()
    return {"qtables": of_layers, "subsampling": sampling if sampling in (FULL, HALF_WIDTH, QUARTER) else FULL}


def _turned(table: list[int], orientation: int) -> list[int]:
    """The table for the transposed frequencies of an image on its side."""
    if orientation not in SIDEWAYS:
        return table
    return [table[BLOCK * column + row] for row in range(BLOCK) for column in range(BLOCK)]


def _is_lossless(data: bytes) -> bool:
    """Return whether a WebP's pixels, or those of its first frame, are stored without loss."""
    at, end = 12, len(data)
    while at + 8 <= end:
        kind, size = data[at : at + 4], int(struct.unpack("<I", data[at + 4 : at + 8])[0])
        if kind == FRAME:
            at, end = at + 8 + FRAME_HEADER_BYTES, min(end, at + 8 + size)
            continue
        if kind in (VP8L, b"VP8 "):
            return kind == VP8L
        at += 8 + size + size % 2
    return False
