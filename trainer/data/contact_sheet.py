"""A few samples as the model will get them, with their pictures, for people to look at."""

from __future__ import annotations

import heapq
import json
from pathlib import Path
from typing import Any

from trainer.data.checks import CheckedImage
from trainer.data.disk_table import short_digest
from trainer.data.samples import Split, Turn
from trainer.data.thumbnails import thumbnail

FOLDER = "contact_sheet"
NAME = "contact_sheet.json"
SAMPLES = 24
SHOWN_IMAGES = 2  # of one sample
SHOWN_TURNS = 3
SHOWN_CHARS = 400  # of a question or an answer


class ContactSheet:
    """Keeps the samples whose ids have the smallest hashes: an even choice that does not depend on their order."""

    def __init__(self) -> None:
        self._kept: list[tuple[int, str, dict[str, Any], tuple[CheckedImage, ...]]] = []

    def add(self, identity: str, split: Split, turns: tuple[Turn, ...], images: tuple[CheckedImage, ...]) -> None:
        rank = -int.from_bytes(short_digest("contact sheet", identity), "big")
        if len(self._kept) == SAMPLES and rank < self._kept[0][0]:
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
        heapq.heappush(self._kept, (rank, identity, record, images[:SHOWN_IMAGES]))
        if len(self._kept) > SAMPLES:
            heapq.heappop(self._kept)

    def write(self, folder: Path) -> None:
        """Write `contact_sheet.json` and the small pictures that it names."""
        (folder / FOLDER).mkdir()
        lines = []
        for number, (_, _, record, images) in enumerate(sorted(self._kept, key=lambda kept: kept[1])):
            names = []
            for place, image in enumerate(images):
                names.append(f"{FOLDER}/{number}-{place}.png")
                (folder / names[-1]).write_bytes(thumbnail(image.data, image.width * image.height))
            lines.append(record | {"pictures": names})
        (folder / NAME).write_text(json.dumps({"samples": lines}, indent=1, ensure_ascii=False) + "\n")
