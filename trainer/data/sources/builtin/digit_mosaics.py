"""Built-in sets `digit-mosaics` and `digit-mosaic-questions`: six tinted scans of handwritten digits on a mosaic.

A question names a colour, and the answer is the digit of that colour: one of the cells says it. The first set has a
record with three questions for each image, of 2 x 3 to 6 x 6 cells: a model that has only seen images with dark
cells fails where a selection leaves these out. The second has a record with one question for each, always of 6 x 6
cells. No scan appears in both splits.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property, partial

import numpy as np
from PIL import Image

from vlmpipe.trainer.data.sample import (
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
from vlmpipe.trainer.data.sources.base import Source
from vlmpipe.trainer.data.sources.builtin import installed_version
from vlmpipe.trainer.data.sources.builtin.digit_scans import SCAN_MAX, DigitScans, read_digit_scans

GENERATOR_VERSION = 3  # raise it when images or questions change
SIDE = 6  # cells
CELL = 8  # pixels: a scan's own size
MOSAICS_PER_SCAN = 2  # mosaics that a scan begins
GRIDS = [(rows, columns) for rows in range(2, SIDE + 1) for columns in range(2, SIDE + 1) if rows * columns >= 6]
QUESTIONS = 3  # about an image; of more, models learn to name what has not been named instead of looking
COLOURS = {
    "red": (255, 0, 0),
    "green": (0, 255, 0),
    "blue": (0, 0, 255),
    "yellow": (255, 255, 0),
    "cyan": (0, 255, 255),
    "magenta": (255, 0, 255),
}


class DigitMosaicsSource(Source):
    """`MOSAICS_PER_SCAN` images for each scan. one_question: a record has one question instead of all."""

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
    def _scans(self) -> DigitScans:
        return read_digit_scans()

    @property
    def _labels(self) -> list[int]:
        return self._scans.labels

    def _sample(self, name: str, scans: list[int], split: Split) -> Sample:
        grid = (SIDE, SIDE) if self._one_question else stable_shuffle(GRIDS, f"{name} grid")[0]
        cells = stable_shuffle(range(grid[0] * grid[1]), name)[: len(COLOURS)]
        asked = stable_shuffle(range(len(COLOURS)), f"{name} questions")
        turns = [
            Turn(
                (f"{IMAGE_TOKEN}\n" if not number else "") + f"which digit is {list(COLOURS)[place]}?",
                str(self._labels[scans[place]]),
                region=_region(cells[place], grid),
            )
            for number, place in enumerate(asked[: 1 if self._one_question else QUESTIONS])
        ]
        description = f"mosaic {GENERATOR_VERSION} {name} {grid}"
        image = ImageRef(name, partial(self._png, cells, scans, grid), lambda: description)
        return Sample(name, tuple(turns), (image,), f"builtin:digit-mosaics {name}", split)

    def _png(self, cells: list[int], scans: list[int], grid: tuple[int, int]) -> bytes:
        rows, columns = grid
        canvas = np.zeros((rows * CELL, columns * CELL, 3), np.uint8)
        for colour, cell, scan in zip(COLOURS.values(), cells, scans, strict=True):
            top, left = cell // columns * CELL, cell % columns * CELL
            tinted = self._scans.images[scan][..., None] / SCAN_MAX * np.array(colour)
            canvas[top : top + CELL, left : left + CELL] = tinted.astype(np.uint8)
        return png_bytes(Image.fromarray(canvas))


def _region(cell: int, grid: tuple[int, int]) -> tuple[float, float, float, float]:
    (rows, columns), left, top = grid, cell % grid[1], cell // grid[1]
    return left / columns, top / rows, (left + 1) / columns, (top + 1) / rows
