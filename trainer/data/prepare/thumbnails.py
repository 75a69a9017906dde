"""Thumbnails for the run report, of rejected samples too."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from PIL import Image

from trainer.data.prepare.checks import DECODE_ERRORS, FORMATS
from trainer.data.rejects import Reject, RejectCode, RejectedError

FOLDER = "reject_pictures"
SIDE_PIXELS = 160


def thumbnail(data: bytes, max_pixels: int) -> bytes:
    """A small PNG of an encoded picture; nothing when it does not decode or has more pixels than that."""
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        if image.width * image.height > max_pixels:
            return b""
        image.draft("RGB", (SIDE_PIXELS, SIDE_PIXELS))  # a JPEG decodes straight to about this size
        small = image.convert("RGB")
    except (Image.DecompressionBombError, *DECODE_ERRORS):
        return b""
    small.thumbnail((SIDE_PIXELS, SIDE_PIXELS))
    buffer = io.BytesIO()
    small.save(buffer, "PNG")
    return buffer.getvalue()


def write_reject_pictures(
    examples: Mapping[RejectCode, Sequence[Reject]], folder: Path, max_pixels: int
) -> dict[str, list[str]]:
    """Write `reject_pictures/<code>-<n>.png` for the examples that have a picture which can be shown.

    Returns for each code the file of each example, empty where there is none.
    """
    written = {}
    for code, rejects in examples.items():
        names = []
        for number, reject in enumerate(rejects):
            name = f"{FOLDER}/{code}-{number}.png"
            if data := _picture_of(reject, max_pixels):
                (folder / FOLDER).mkdir(exist_ok=True)
                (folder / name).write_bytes(data)
            names.append(name if data else "")
        written[str(code)] = names
    return written


def _picture_of(reject: Reject, max_pixels: int) -> bytes:
    """The picture may be the very thing that is wrong, or not be there."""
    if reject.image is None:
        return b""
    try:
        return thumbnail(reject.image.read(), max_pixels)
    except RejectedError:
        return b""
