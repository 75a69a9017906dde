"""Small images of samples and rejects for the run report."""

from __future__ import annotations

import heapq
import io
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from PIL import Image

from vlmpipe.trainer.data.prepare.validation.checks import DECODE_ERRORS, FORMATS, CheckedImage
from vlmpipe.trainer.data.rejects import Reject, RejectCode, RejectedError
from vlmpipe.trainer.data.sample import Split, Turn, png_bytes
from vlmpipe.trainer.data.sqlite_table import short_digest
from vlmpipe.trainer.storage.base import Storage

REJECTS_FOLDER = "reject_pictures"
SHEET_FOLDER = "contact_sheet"
SHEET = "contact_sheet.json"
SIDE_PIXELS = 160
SHEET_SAMPLES = 24
SHOWN_IMAGES = 2  # of one sample
SHOWN_TURNS = 3
SHOWN_CHARS = 400  # of a question or an answer


def thumbnail(data: bytes, max_pixels: int) -> bytes:
    """A small PNG of an encoded image; empty when it does not decode or has more than `max_pixels`."""
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        if image.width * image.height > max_pixels:
            return b""
        image.draft("RGB", (SIDE_PIXELS, SIDE_PIXELS))  # a JPEG decodes straight to about this size
        small = image.convert("RGB")
    except (Image.DecompressionBombError, *DECODE_ERRORS):
        return b""
    small.thumbnail((SIDE_PIXELS, SIDE_PIXELS))
    return png_bytes(small)


def write_reject_images(
    examples: Mapping[RejectCode, Sequence[Reject]], folder: Path, max_pixels: int
) -> dict[str, list[str]]:
    """Write `reject_pictures/<code>-<n>.png` for the examples whose image can be read.

    Returns the file of each example by code; "" where there is none.
    """
    written = {}
    for code, rejects in examples.items():
        names = []
        for number, reject in enumerate(rejects):
            name = f"{REJECTS_FOLDER}/{code}-{number}.png"
            data = b""
            if reject.image:
                with suppress(RejectedError):  # the image may be what is missing or wrong
                    data = thumbnail(reject.image.read(), max_pixels)
            if data:
                (folder / REJECTS_FOLDER).mkdir(exist_ok=True)
                (folder / name).write_bytes(data)
            names.append(name if data else "")
        written[str(code)] = names
    return written


class ContactSheet:
    """Sample records for people: those whose ids have the smallest hashes, an even and order-independent choice."""

    def __init__(self) -> None:
        self._kept: list[tuple[int, str, dict[str, object], tuple[tuple[bytes, int], ...]]] = []

    def add(self, identity: str, split: Split, turns: tuple[Turn, ...], images: tuple[CheckedImage, ...]) -> None:
        if not self._wanted(identity):
            return
        record = {
            "id": identity,
            "split": split,
            "turns": [
                {"question": turn.question[:SHOWN_CHARS], "answer": turn.answer[:SHOWN_CHARS]}
                for turn in turns[:SHOWN_TURNS]
            ],
            "more_turns": max(0, len(turns) - SHOWN_TURNS),
            "more_pictures": max(0, len(images) - SHOWN_IMAGES),
        }
        self._keep(record, tuple((image.data, image.width * image.height) for image in images[:SHOWN_IMAGES]))

    def add_sheet(self, sheet: Storage) -> None:
        """Add the samples of a written sheet."""
        for line in json.loads(sheet.read(SHEET))["samples"]:
            if self._wanted(line["id"]):
                record = {name: value for name, value in line.items() if name != "pictures"}
                # A thumbnail of a thumbnail is the same image.
                self._keep(record, tuple((sheet.read(name), SIDE_PIXELS**2) for name in line["pictures"]))

    def _wanted(self, identity: str) -> bool:
        return len(self._kept) < SHEET_SAMPLES or _rank(identity) >= self._kept[0][0]

    def _keep(self, record: dict[str, Any], images: tuple[tuple[bytes, int], ...]) -> None:
        """`images`: encoded bytes and number of pixels of each."""
        heapq.heappush(self._kept, (_rank(record["id"]), record["id"], record, images))
        if len(self._kept) > SHEET_SAMPLES:
            heapq.heappop(self._kept)

    def write(self, folder: Path) -> None:
        """Write `contact_sheet.json` and the thumbnails that it names."""
        (folder / SHEET_FOLDER).mkdir()
        lines = []
        for number, (_, _, record, images) in enumerate(sorted(self._kept, key=lambda entry: entry[1])):
            names = []
            for place, (data, pixels) in enumerate(images):
                names.append(f"{SHEET_FOLDER}/{number}-{place}.png")
                (folder / names[-1]).write_bytes(thumbnail(data, pixels))
            lines.append(record | {"pictures": names})
        (folder / SHEET).write_text(
            json.dumps({"samples": lines}, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
        )


def _rank(identity: str) -> int:
    """Samples of higher rank are kept."""
    return -int.from_bytes(short_digest("contact sheet", identity), "big")
