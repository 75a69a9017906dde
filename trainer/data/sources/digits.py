"""Built-in set `digits`: the 1,797 scans of handwritten digits in scikit-learn, with questions made from their labels.

Every picture is a 64 x 64 canvas of four cells. One cell holds a coloured scan, or two cells hold a red and a blue one.
No scan appears in both splits, alone or on a canvas with another. (Scans: Alpaydin and Kaynak, "Optical Recognition of
Handwritten Digits", UCI repository.)
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from functools import cached_property, partial

import numpy as np
from PIL import Image

from trainer.data.samples import (
    IMAGE_TOKEN,
    SPLITS,
    ImageRef,
    Sample,
    Split,
    Turn,
    split_of,
    stable_shuffle,
)
from trainer.data.sources import require

GENERATOR_VERSION = 3  # raise it when pictures or questions change
SCAN_SCALE = 4  # an 8 x 8 scan becomes 32 x 32
CELL_SIDE = 8 * SCAN_SCALE  # pixels
CELLS = ((0, 0), (0, 1), (1, 0), (1, 1))  # row and column of each cell
COLOURS = {"red": (255, 64, 64), "green": (64, 224, 64), "blue": (80, 128, 255), "yellow": (255, 224, 64)}
CANVASES_PER_SCAN = 2  # two-digit canvases in which a scan is the red one
SCAN_MAX = 16  # scikit-learn's grey levels are 0 to 16


class DigitsSource:
    """Three records a scan: the scan alone, and as the left digit of two canvases."""

    def __init__(self, held_out_fraction: float) -> None:
        self._held_out_fraction = held_out_fraction

    def fingerprint(self) -> str:
        version = require("sklearn", "scikit-learn").__version__
        return f"digits {GENERATOR_VERSION} scikit-learn {version}"

    def __iter__(self) -> Iterator[Sample]:
        for scan, partners in enumerate(self._partners()):
            yield self._single(scan)
            for partner in partners:
                yield self._pair(scan, partner)

    def split_of_scan(self, scan: int) -> Split:
        return split_of(f"digits-scan-{scan}", self._held_out_fraction)

    @cached_property
    def _dataset(self) -> tuple[np.ndarray, list[int]]:
        digits = require("sklearn.datasets", "scikit-learn").load_digits()
        return digits.images, [int(label) for label in digits.target]

    @property
    def _labels(self) -> list[int]:
        return self._dataset[1]

    def _partners(self) -> list[list[int]]:
        """For each scan, the blue ones where it is red: its successors on a shuffled circle of its own split."""
        partners: list[list[int]] = [[] for _ in self._labels]
        scans = range(len(self._labels))
        for split in SPLITS:
            circle = stable_shuffle((scan for scan in scans if self.split_of_scan(scan) == split), "digits-circle")
            steps = range(1, min(CANVASES_PER_SCAN, len(circle) - 1) + 1)
            for place, scan in enumerate(circle):
                partners[scan] = [circle[(place + step) % len(circle)] for step in steps]
        return partners

    def _single(self, scan: int) -> Sample:
        digit, name = self._labels[scan], f"digit-{scan}"
        colour = stable_shuffle(COLOURS, name)[0]
        questions = [
            ("what digit is this?", str(digit), "digit"),
            ("is it even?", _yes_no(digit % 2 == 0), "even"),
            ("is it greater than 4?", _yes_no(digit > 4), "greater_than_4"),
            ("what colour is it?", colour, "colour"),
        ]
        return self._sample(name, {colour: scan}, questions)

    def _pair(self, red: int, blue: int) -> Sample:
        a, b = self._labels[red], self._labels[blue]
        larger = "same" if a == b else "red" if a > b else "blue"
        questions = [
            ("what is the red digit?", str(a), "red_digit"),
            ("what is the blue digit?", str(b), "blue_digit"),
            ("which is larger, red or blue?", larger, "larger"),
            ("what is the sum?", str(a + b), "sum"),
        ]
        return self._sample(f"digits-{red}-{blue}", {"red": red, "blue": blue}, questions)

    def _sample(self, name: str, scans: dict[str, int], questions: list[tuple[str, str, str]]) -> Sample:
        # Shuffled, so that a question is asked sometimes before and sometimes after those that give its answer away.
        turns = [Turn(*question) for question in stable_shuffle(questions, name)]
        turns[0] = Turn(f"{IMAGE_TOKEN}\n{turns[0].question}", turns[0].answer, turns[0].slice)
        split = self.split_of_scan(next(iter(scans.values())))
        image = ImageRef(name, partial(self._png, name, scans))
        return Sample(name, tuple(turns), (image,), f"builtin:digits {name}", split)

    def _png(self, name: str, scans: dict[str, int]) -> bytes:
        canvas = np.zeros((2 * CELL_SIDE, 2 * CELL_SIDE, 3), np.uint8)
        cells = stable_shuffle(CELLS, name)
        for (row, column), (colour, scan) in zip(cells, scans.items(), strict=False):
            share = (self._dataset[0][scan] / SCAN_MAX).repeat(SCAN_SCALE, 0).repeat(SCAN_SCALE, 1)
            top, left = row * CELL_SIDE, column * CELL_SIDE
            canvas[top : top + CELL_SIDE, left : left + CELL_SIDE] = share[..., None] * np.array(COLOURS[colour])
        buffer = io.BytesIO()
        Image.fromarray(canvas).save(buffer, "PNG")
        return buffer.getvalue()


def _yes_no(value: bool) -> str:
    return "yes" if value else "no"
