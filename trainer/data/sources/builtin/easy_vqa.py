"""Built-in set `easy-vqa`: 5,000 images of a coloured shape with 48,000 questions, from the package of that name.

One record an image, with all its questions. The package's own test images are the validation split.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from itertools import zip_longest
from pathlib import Path

from vlmpipe.trainer.data.sample import ImageRef, Sample, Split, shuffled_turns
from vlmpipe.trainer.data.sources.base import Source
from vlmpipe.trainer.data.sources.builtin import require

GENERATOR_VERSION = 1
TRAIN_PER_TEST = 4  # the package has four train images for each test image
SHAPES = {"circle", "rectangle", "triangle"}
Questions = tuple[Sequence[str], Sequence[str], Sequence[int]]  # parallel: texts, answers and numbers of images


class EasyVqaSource(Source):
    """Interleaves train and test images, so that the first N records have both."""

    def __init__(self) -> None:
        self._package = require("easy_vqa", "easy-vqa")

    def fingerprint(self) -> str:
        return f"easy-vqa {GENERATOR_VERSION} package {version('easy-vqa')}"

    def __iter__(self) -> Iterator[Sample]:
        train = self._samples("train", self._package.get_train_questions(), self._package.get_train_image_paths())
        test = self._samples("eval", self._package.get_test_questions(), self._package.get_test_image_paths())
        for group in zip_longest(*[train] * TRAIN_PER_TEST, test):
            yield from (sample for sample in group if sample is not None)

    def _samples(self, split: Split, questions: Questions, paths: dict[int, str]) -> Iterator[Sample]:
        by_image: dict[int, list[tuple[str, str, str]]] = defaultdict(list)
        texts, answers, images = questions
        for text, answer, number in zip(texts, answers, images, strict=True):
            by_image[number].append((text, answer, _slice(answer)))
        for number in sorted(by_image):
            name = f"easy-vqa-{split}-{number}"
            turns, path = shuffled_turns(by_image[number], name), Path(paths[number])
            yield Sample(name, turns, (ImageRef(name, path.read_bytes),), f"builtin:easy-vqa {name}", split)


def _slice(answer: str) -> str:
    if answer in ("yes", "no"):
        return "yes_no"
    return "shape" if answer in SHAPES else "colour"
