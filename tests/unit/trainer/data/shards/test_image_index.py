"""Tables of images say what dicts of them would."""

from __future__ import annotations

import hashlib

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vlmpipe.trainer.data.shards.image_index import ImageLocation, ImageTable, UniqueImages, hashes_of

NAMES = [hashlib.sha256(b"%d" % number).hexdigest() for number in range(28)]
NAMES += ["0" * 64, "ab" + "0" * 62]  # numpy's texts end before their zeros
names = st.sampled_from(NAMES)


@given(st.lists(names, max_size=40), st.lists(names, max_size=20))
def test_a_table_finds_the_first_of_equal_images(images: list[str], wanted: list[str]) -> None:
    expected = [images.index(image) if image in images else -1 for image in wanted]
    assert ImageTable(images).find(wanted).tolist() == expected


@given(st.lists(st.tuples(names, st.integers(0, 3), st.integers(0, 99)), max_size=40, unique_by=lambda line: line[1:]))
def test_unique_images_come_in_the_order_of_their_first_places(found: list[tuple[str, int, int]]) -> None:
    places = np.array([(shard, offset, 7, offset % 2) for _, shard, offset in found], np.int64).reshape(-1, 4)
    unique = UniqueImages(hashes_of([name for name, *_ in found]), [f"s{n}" for n in range(4)], places)
    expected: dict[str, ImageLocation] = {}
    for name, shard, offset in sorted(found, key=lambda line: line[1:]):
        expected.setdefault(name, ImageLocation(f"s{shard}", offset, 7, is_video=bool(offset % 2)))
    assert list(unique.items()) == list(expected.items())
    assert [name in unique for name in NAMES] == [name in expected for name in NAMES]
