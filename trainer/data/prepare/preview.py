"""A few samples as the model will see them, with their images, for people to look at."""

from __future__ import annotations

import heapq
import json
from pathlib import Path
from typing import Any

from trainer.data.prepare.checks import CheckedImage
from trainer.data.prepare.thumbnails import SIDE_PIXELS, thumbnail
from trainer.data.sample import Split, Turn
from trainer.data.sqlite_table import short_digest
from trainer.storage.base import Storage

FOLDER = "contact_sheet"
NAME = "contact_sheet.json"
SAMPLES = 24
SHOWN_IMAGES = 2  # of one sample
SHOWN_TURNS = 3
SHOWN_CHARS = 400  # of a question or an answer


class ContactSheet:
    """Keeps the samples whose ids have the smallest hashes: an even choice that does not depend on their order."""

    def __init__(self) -> None:
        self._kept: list[tuple[int, str, dict[str, Any], tuple[tuple[bytes, int], ...]]] = []

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
        """The samples of a sheet that `write` has written."""
        for line in json.loads(sheet.read(NAME))["samples"]:
            if self._wanted(line["id"]):
                record = {name: value for name, value in line.items() if name != "pictures"}
                # A small picture made small again is the same picture.
                self._keep(record, tuple((sheet.read(name), SIDE_PIXELS**2) for name in line["pictures"]))

    def _wanted(self, identity: str) -> bool:
        return len(self._kept) < SAMPLES or _rank(identity) >= self._kept[0][0]

    def _keep(self, record: dict[str, Any], pictures: tuple[tuple[bytes, int], ...]) -> None:
        """`pictures`: encoded bytes, and how many pixels they are known to have."""
        heapq.heappush(self._kept, (_rank(record["id"]), record["id"], record, pictures))
        if len(self._kept) > SAMPLES:
            heapq.heappop(self._kept)

    def write(self, folder: Path) -> None:
        """Write `contact_sheet.json` and the small pictures that it names."""
        (folder / FOLDER).mkdir()
        lines = []
        for number, (_, _, record, pictures) in enumerate(sorted(self._kept, key=lambda kept: kept[1])):
            names = []
            for place, (data, pixels) in enumerate(pictures):
                names.append(f"{FOLDER}/{number}-{place}.png")
                (folder / names[-1]).write_bytes(thumbnail(data, pixels))
            lines.append(record | {"pictures": names})
        (folder / NAME).write_text(json.dumps({"samples": lines}, indent=1, ensure_ascii=False) + "\n")


def _rank(identity: str) -> int:
    """The higher, the sooner it is kept."""
    return -int.from_bytes(short_digest("contact sheet", identity), "big")
