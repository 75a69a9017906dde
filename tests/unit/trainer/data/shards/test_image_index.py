"""Tables of images say what dicts of them would."""

from __future__ import annotations

import hashlib
from unittest import mock

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from vlmpipe.trainer.data.packing import Int64Array
from vlmpipe.trainer.data.shards import image_index
from vlmpipe.trainer.data.shards.image_index import ImageLocation, ImageTable, UniqueImages, hashes_of

NAMES = [hashlib.sha256(b"%d" % number).hexdigest() for number in range(28)]
NAMES += ["0" * 64, "ab" + "0" * 62]  # numpy's texts end before their zeros
names = st.sampled_from(NAMES)


@given(st.lists(names, max_size=40), st.lists(names, max_size=20))
def test_a_table_finds_the_first_of_equal_images(images: list[str], wanted: list[str]) -> None:
    expected = [images.index(image) if image in images else -1 for image in wanted]
    assert ImageTable(images).find(wanted).tolist() == expected


class Split:
    """Images of a split in memory: hash, shard, offset."""

    def __init__(self, images: list[tuple[str, int, int]], shards: list[str]) -> None:
        self._images, self.shards = images, shards

    def images(self) -> NDArray[np.bytes_]:
        return hashes_of([name for name, *_ in self._images])

    def image_places(self, rows: Int64Array) -> Int64Array:
        places = [(shard, offset, 7, offset % 2) for _, shard, offset in (self._images[row] for row in rows)]
        return np.array(places, np.int64).reshape(-1, 4)


images_of_split = st.lists(
    st.tuples(names, st.integers(0, 3), st.integers(0, 99)), max_size=40, unique_by=lambda line: line[1:]
)


@given(images_of_split, images_of_split, st.integers(1, 50))
def test_unique_images_come_in_the_order_of_their_first_places(
    train: list[tuple[str, int, int]], validation: list[tuple[str, int, int]], block: int
) -> None:
    splits = [Split(images, [f"{name}{n}" for n in range(4)]) for name, images in (("t", train), ("e", validation))]
    expected: dict[str, ImageLocation] = {}
    for split, images in zip(splits, (train, validation), strict=True):
        for name, shard, offset in sorted(images, key=lambda line: line[1:]):
            expected.setdefault(name, ImageLocation(split.shards[shard], offset, 7, is_video=bool(offset % 2)))
    with mock.patch.object(image_index, "BLOCK", block):
        unique = UniqueImages(splits)
        assert list(unique.items()) == list(expected.items())
        assert unique.locations(0, len(unique)) == list(expected.values())
        assert [name in unique for name in NAMES] == [name in expected for name in NAMES]
        lacking = unique.lacking(ImageTable(NAMES[::2]).find)
        assert list(unique.only(lacking)) == [name for name in expected if name not in NAMES[::2]]
