"""The banded search finds what comparing all pairs finds, and its work is bounded."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlmpipe.trainer.data.near_duplicates import search as searching
from vlmpipe.trainer.data.near_duplicates.search import NONE, NearDuplicates
from vlmpipe.trainer.data.near_duplicates.signature import (
    HASH_BYTES,
    MAX_COLOUR_DISTANCE,
    MAX_HASH_DISTANCE,
    SIGNATURE_BYTES,
    Signatures,
    colour_distance,
    hash_distance,
)


def signatures(count: int, seed: int) -> Signatures:
    return np.random.default_rng(seed).integers(0, 256, (count, SIGNATURE_BYTES), dtype=np.uint8)


def with_flipped(signature: Signatures, bits: int, seed: int) -> Signatures:
    """A signature whose hash differs in exactly so many bits."""
    hashed = np.unpackbits(signature[:HASH_BYTES])
    hashed[np.random.default_rng(seed).choice(len(hashed), bits, replace=False)] ^= 1
    return np.concatenate([np.packbits(hashed), signature[HASH_BYTES:]])


@settings(max_examples=12)
@given(
    flips=st.lists(st.integers(0, MAX_HASH_DISTANCE + 3), min_size=1, max_size=12),
    seed=st.integers(0, 1000),
    pieces=st.integers(1, 3),
)
def test_the_search_finds_the_pairs_that_comparing_all_finds(flips: list[int], seed: int, pieces: int) -> None:
    searched = signatures(len(flips) + 3, seed)
    others = np.stack([with_flipped(searched[place], bits, seed + place) for place, bits in enumerate(flips)])
    others = np.concatenate([others, signatures(5, seed + 1)])
    others[0, HASH_BYTES:] = searched[0, HASH_BYTES:] ^ 0x80  # the first has other colours
    search = NearDuplicates(searched)
    for part in np.array_split(np.arange(len(others)), pieces):
        assert search.add(others[part], part) == len(part)
    for place, one in enumerate(searched):
        same = np.repeat(one[None], len(others), axis=0)
        distances = hash_distance(same, others)
        alike = (distances <= MAX_HASH_DISTANCE) & (colour_distance(same, others) <= MAX_COLOUR_DISTANCE)
        if alike.any():
            assert alike[search.found[place]] and search.distances[place] == distances[search.found[place]]
        else:
            assert search.found[place] == search.distances[place] == NONE


def test_the_work_is_bounded_and_what_was_not_compared_is_counted() -> None:
    one = signatures(1, 0)
    crowd = np.repeat(one, 3000, axis=0)
    crowd[:, HASH_BYTES:] = 255 - one[:, HASH_BYTES:]  # the same hash in other colours: candidates, never pairs
    search = NearDuplicates(np.repeat(one, 100, axis=0), max_comparisons=200_000)
    compared = sum(search.add(part, np.arange(len(part))) for part in np.array_split(crowd, 30))
    assert 0 < compared < 1000 and search.comparisons_left <= 0 and (search.found == NONE).all()


def test_images_that_all_look_alike_are_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searching, "COMPARED_AT_ONCE", 1 << 14)
    one = signatures(1, 0)
    search = NearDuplicates(np.repeat(one, 500, axis=0))
    others = np.repeat(one, 5000, axis=0)
    assert search.add(others, np.arange(len(others))) == len(others)
    assert (search.found >= 0).all()
    assert searching.MAX_COMPARISONS - search.comparisons_left < 500 * 16 * 17 * 8
