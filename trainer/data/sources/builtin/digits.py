"""Built-in set `digits`: the 1,797 scans of handwritten digits in scikit-learn, with questions made from their labels.

Every image is a grey 64 x 64 canvas of four cells, with one scan in a cell or with two scans in two of them. No scan
appears in both splits, alone or on a canvas with another. (Scans: Alpaydin and Kaynak, "Optical Recognition of
Handwritten Digits", UCI repository.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property, partial

import numpy as np
from PIL import Image

from vlmpipe.trainer.data.sample import (
    SPLITS,
    ImageRef,
    Sample,
    Split,
    Turn,
    png_bytes,
    shuffled_turns,
    split_of,
    stable_shuffle,
)
from vlmpipe.trainer.data.sources.base import Source
from vlmpipe.trainer.data.sources.builtin import installed_version
from vlmpipe.trainer.data.sources.builtin.digit_scans import SCAN_MAX, DigitScans, read_digit_scans

GENERATOR_VERSION = 1  # raise it when images or questions change
SCAN_SCALE = 4  # an 8 x 8 scan becomes 32 x 32
CELL_SIDE = 8 * SCAN_SCALE  # pixels
CELLS = ((0, 0), (0, 1), (1, 0), (1, 1))  # row and column of each cell
CANVASES_PER_SCAN = 2  # two-digit canvases that a scan begins


class DigitsSource(Source):
    """Three records per scan: the scan alone, and as the left digit of two canvases."""

    def __init__(self, validation_fraction: float) -> None:
        self._validation_fraction = validation_fraction

    def fingerprint(self) -> str:
        return f"digits {GENERATOR_VERSION} scikit-learn {installed_version('sklearn', 'scikit-learn')}"

    def __iter__(self) -> Iterator[Sample]:
        for scan, partners in enumerate(self._partners()):
            yield self._single(scan)
            for partner in partners:
                yield self._pair(scan, partner)

    def split_of_scan(self, scan: int) -> Split:
        return split_of(f"digits-scan-{scan}", self._validation_fraction)

    @cached_property
    def _scans(self) -> DigitScans:
        return read_digit_scans()

    @property
    def _labels(self) -> list[int]:
        return self._scans.labels

    def _partners(self) -> list[list[int]]:
        """For each scan, the second scans of its canvases: its successors on a shuffled circle of its own split."""
        partners: list[list[int]] = [[] for _ in self._labels]
        scans = range(len(self._labels))
        for split in SPLITS:
            circle = stable_shuffle((scan for scan in scans if self.split_of_scan(scan) == split), "digits-circle")
            steps = range(1, min(CANVASES_PER_SCAN, len(circle) - 1) + 1)
            for place, scan in enumerate(circle):
                partners[scan] = [circle[(place + step) % len(circle)] for step in steps]
        return partners

    def _single(self, scan: int) -> Sample:
        digit = self._labels[scan]
        questions = [
            ("what digit is this?", str(digit), "digit"),
            ("is it even?", _yes_no(digit % 2 == 0), "even"),
            ("is it greater than 4?", _yes_no(digit > 4), "greater_than_4"),
        ]
        return self._sample(f"digit-{scan}", [scan], questions)

    def _pair(self, first: int, second: int) -> Sample:
        a, b = self._labels[first], self._labels[second]
        questions = [
            ("what is the sum?", str(a + b), "sum"),
            ("what is the larger digit?", str(max(a, b)), "larger_digit"),
            ("what is the smaller digit?", str(min(a, b)), "smaller_digit"),
            ("is the sum greater than 9?", _yes_no(a + b > 9), "sum_greater_than_9"),
        ]
        return self._sample(f"digits-{first}-{second}", [first, second], questions)

    def _sample(self, name: str, scans: list[int], questions: list[tuple[str, str, str]]) -> Sample:
        image = ImageRef(name, partial(self._png, name, scans), lambda: f"{self.fingerprint()} {name}")
        turns = shuffled_turns(questions, name)
        turns = (*turns[:-1], replace(turns[-1], rejected=self._wrong_answer(turns[-1], name)))
        return Sample(name, turns, (image,), f"builtin:digits {name}", self.split_of_scan(scans[0]))

    def _wrong_answer(self, turn: Turn, name: str) -> str:
        """An answer of the same kind, the same for each run: for training on preferences."""
        if turn.answer in ("yes", "no"):
            return _yes_no(turn.answer == "no")
        answers = range(19 if turn.slice == "sum" else 10)
        return stable_shuffle((str(answer) for answer in answers if str(answer) != turn.answer), name)[0]

    def _png(self, name: str, scans: list[int]) -> bytes:
        canvas = np.zeros((2 * CELL_SIDE, 2 * CELL_SIDE), np.uint8)
        for (row, column), scan in zip(stable_shuffle(CELLS, name), scans, strict=False):
            grey = (self._scans.images[scan] * (255 / SCAN_MAX)).astype(np.uint8)
            top, left = row * CELL_SIDE, column * CELL_SIDE
            canvas[top : top + CELL_SIDE, left : left + CELL_SIDE] = grey.repeat(SCAN_SCALE, 0).repeat(SCAN_SCALE, 1)
        return png_bytes(Image.fromarray(canvas))


def _yes_no(value: bool) -> str:
    return "yes" if value else "no"
