"""Built-in sets `digit-mosaics` and `digit-mosaic-questions`: six tinted scans of handwritten digits on a 6 x 6 mosaic.

A question names a colour, and the answer is the digit of that colour: one of 36 cells says it. The first set has a
record with six questions for each picture, the second a record with one of them. No scan appears in both splits.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property, partial

import numpy as np
from PIL import Image

from trainer.data.sample import (
    IMAGE_TOKEN,
    SPLITS,
    ImageRef,
    Sample,
    Split,
    Turn,
    png_bytes,
    split_of,
    stable_shuffle,
)
from trainer.data.sources.base import Source
from trainer.data.sources.builtin import installed_version, require

GENERATOR_VERSION = 1  # raise it when pictures or questions change
SIDE = 6  # cells
CELL = 8  # pixels: a scan's own size
MOSAICS_PER_SCAN = 2  # mosaics that a scan begins
SCAN_MAX = 16  # scikit-learn's grey levels are 0 to 16
COLOURS = {
    "red": (255, 0, 0),
    "green": (0, 255, 0),
    "blue": (0, 0, 255),
    "yellow": (255, 255, 0),
    "cyan": (0, 255, 255),
    "magenta": (255, 0, 255),
}


class DigitMosaicsSource(Source):
    """`MOSAICS_PER_SCAN` pictures for each scan. one_question: a record has one question instead of all."""

    def __init__(self, validation_fraction: float, *, one_question: bool) -> None:
        self._validation_fraction, self._one_question = validation_fraction, one_question

    def fingerprint(self) -> str:
        name = "digit-mosaic-questions" if self._one_question else "digit-mosaics"
        return f"{name} {GENERATOR_VERSION} scikit-learn {installed_version('sklearn', 'scikit-learn')}"

    def __iter__(self) -> Iterator[Sample]:
        for split in SPLITS:
            circle = stable_shuffle((scan for scan in range(len(self._labels)) if self._split(scan) == split), "mosaic")
            for turn in range(MOSAICS_PER_SCAN):
                step = 1 + 7 * turn  # another company for each scan in each round
                for place in range(len(circle)):
                    scans = [circle[(place + step * number) % len(circle)] for number in range(len(COLOURS))]
                    yield self._sample(f"mosaic-{turn}-{scans[0]}", scans, split)

    def _split(self, scan: int) -> Split:
        return split_of(f"digits-scan-{scan}", self._validation_fraction)

    @cached_property
    def _dataset(self) -> tuple[np.ndarray, list[int]]:
        digits = require("sklearn.datasets", "scikit-learn").load_digits()
        return digits.images, [int(label) for label in digits.target]

    @property
    def _labels(self) -> list[int]:
        return self._dataset[1]

    def _sample(self, name: str, scans: list[int], split: Split) -> Sample:
        cells = stable_shuffle(range(SIDE * SIDE), name)[: len(COLOURS)]
        asked = stable_shuffle(range(len(COLOURS)), f"{name} questions")
        turns = [
            Turn(
                (f"{IMAGE_TOKEN}\n" if not number else "") + f"which digit is {list(COLOURS)[place]}?",
                str(self._labels[scans[place]]),
                region=_region(cells[place]),
            )
            for number, place in enumerate(asked[:1] if self._one_question else asked)
        ]
        image = ImageRef(name, partial(self._png, cells, scans), lambda: f"mosaic {GENERATOR_VERSION} {name}")
        return Sample(name, tuple(turns), (image,), f"builtin:digit-mosaics {name}", split)

    def _png(self, cells: list[int], scans: list[int]) -> bytes:
        canvas = np.zeros((SIDE * CELL, SIDE * CELL, 3), np.uint8)
        for colour, cell, scan in zip(COLOURS.values(), cells, scans, strict=True):
            top, left = cell // SIDE * CELL, cell % SIDE * CELL
            tinted = self._dataset[0][scan][..., None] / SCAN_MAX * np.array(colour)
            canvas[top : top + CELL, left : left + CELL] = tinted.astype(np.uint8)
        return png_bytes(Image.fromarray(canvas))


def _region(cell: int) -> tuple[float, float, float, float]:
    left, top = cell % SIDE, cell // SIDE
    return left / SIDE, top / SIDE, (left + 1) / SIDE, (top + 1) / SIDE
