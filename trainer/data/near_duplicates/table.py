"""The signatures of a prepared data set, and which of some images look like its training images."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from vlmpipe.trainer.data.near_duplicates.search import (
    MAX_COMPARISONS,
    MAX_SEARCHED,
    NONE,
    NearDuplicates,
    as_signatures,
)
from vlmpipe.trainer.data.sample import Split

NAME = "image_signatures.parquet"
SCHEMA = pa.schema(
    [
        ("split", pa.string()),
        ("id", pa.string()),  # of the sample
        ("image", pa.int32()),  # place of the image in the sample
        ("sha256", pa.string()),
        ("signature", pa.binary()),  # null of an image without structure, and of a video
    ]
)
SHOWN_PAIRS = 12
# With a tenth of the images for validation, MAX_COMPARISONS are spent before this number was searched.
MAX_VALIDATION_IMAGES = 1 << 17


class SignatureWriter:
    """Collects the signatures of a chunk's images, the first of equal ones."""

    def __init__(self) -> None:
        self._lines: dict[tuple[Split, str], dict[str, object]] = {}

    def add(self, split: Split, identity: str, image: int, sha256: str, signature: bytes) -> None:
        line = {"split": split, "id": identity, "image": image, "sha256": sha256, "signature": signature or None}
        self._lines.setdefault((split, sha256), line)

    def write(self, folder: Path) -> None:
        pq.write_table(pa.Table.from_pylist(list(self._lines.values()), SCHEMA), folder / NAME)


@dataclass(frozen=True)
class LikeTrain:
    """Searched images that look like a training image.

    images: how many were searched; without_signature: how many more have none.
    found: by name of an image, the sample and place of a training image and the bits in which their hashes differ.
    compared: share of all pairs that was compared, 1 but for sets so large that the work is bounded.
    """

    images: int
    without_signature: int
    nearest: Mapping[str, tuple[str, int, int]]
    compared: float

    def closest(self) -> list[tuple[str, tuple[str, int, int]]]:
        """The closest pairs, for people."""
        return sorted(self.nearest.items(), key=lambda pair: (pair[1][2], pair[0]))[:SHOWN_PAIRS]


def like_train(table: Path, searched: Mapping[str, bytes], max_comparisons: int = MAX_COMPARISONS) -> LikeTrain:
    """Search images, signatures by name, among the training images of a table.

    The table is read as often as MAX_SEARCHED images are searched, up to the last comparison, in memory that does not
    grow with it.
    """
    named = sorted((name, signature) for name, signature in searched.items() if signature)
    nearest: dict[str, tuple[str, int, int]] = {}
    compared = 0
    pairs = len(named) * sum(map(len, _training_images(table)))
    for start in range(0, len(named), MAX_SEARCHED):
        names, values = zip(*named[start : start + MAX_SEARCHED], strict=True)
        search, first = NearDuplicates(as_signatures(values), max_comparisons), 0
        for lines in _training_images(table):
            done = search.add(as_signatures(lines.column("signature").to_pylist()), first + np.arange(len(lines)))
            compared, first = compared + len(names) * done, first + len(lines)
            if done < len(lines):
                break
        max_comparisons = search.comparisons_left
        places = np.flatnonzero(search.found != NONE)
        sources = _lines_at(table, set(search.found[places].tolist()))
        for place in places.tolist():
            line = sources[int(search.found[place])]
            nearest[names[place]] = (line["id"], line["image"], int(search.distances[place]))
    return LikeTrain(len(named), len(searched) - len(named), nearest, compared / pairs if pairs else 1.0)


def validation_images(table: Path) -> dict[str, tuple[str, int, bytes]]:
    """Sample, place and signature of each distinct validation image by its content hash; b"" for none.

    Of more than MAX_VALIDATION_IMAGES, those with the smallest hashes: any part that is chosen without a look at them.
    """
    images: dict[str, tuple[str, int, bytes]] = {}
    largest = ""  # hash that is looked at; "": every one
    for lines in _batches(table):
        lines = lines.filter(pc.equal(lines.column("split"), "eval"))
        if largest:
            lines = lines.filter(pc.less_equal(lines.column("sha256"), largest))
        for line in lines.to_pylist():
            images.setdefault(line["sha256"], (line["id"], line["image"], line["signature"] or b""))
        if len(images) > 2 * MAX_VALIDATION_IMAGES:
            images, largest = _smallest(images)
    return _smallest(images)[0] if len(images) > MAX_VALIDATION_IMAGES else images


def _smallest(images: dict[str, tuple[str, int, bytes]]) -> tuple[dict[str, tuple[str, int, bytes]], str]:
    """MAX_VALIDATION_IMAGES images, and the largest of their hashes."""
    hashes = sorted(images)[:MAX_VALIDATION_IMAGES]
    return {sha256: images[sha256] for sha256 in hashes}, hashes[-1]


def _batches(table: Path) -> Iterator[pa.RecordBatch]:
    with pq.ParquetFile(table, pre_buffer=False) as file:
        yield from file.iter_batches(batch_size=8192)


def _training_images(table: Path) -> Iterator[pa.RecordBatch]:
    for lines in _batches(table):
        is_train = pc.equal(lines.column("split"), "train")
        yield lines.filter(pc.and_(is_train, pc.is_valid(lines.column("signature"))))


def _lines_at(table: Path, numbers: set[int]) -> dict[int, dict[str, Any]]:
    """Training images by their numbers."""
    by_place, first = {}, 0
    for lines in _training_images(table):
        for place in sorted(number - first for number in numbers if first <= number < first + len(lines)):
            by_place[first + place] = lines.slice(place, 1).to_pylist()[0]
        first += len(lines)
    return by_place
