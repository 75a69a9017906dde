"""Finds which of some images look like images of a much larger set, in time that grows with both, not their product.

Two hashes that differ in few bits share one of their bands, up to one bit. So each image is looked up by its bands, and
only images that share one are compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from vlmpipe.trainer.data.near_duplicates.signature import (
    HASH_BYTES,
    MAX_COLOUR_DISTANCE,
    MAX_HASH_DISTANCE,
    SIGNATURE_BYTES,
    Signatures,
    colour_distance,
    hash_distance,
)

BAND_BITS = 16
BANDS = 8 * HASH_BYTES // BAND_BITS
# By the pigeonhole principle: with 31 bits that differ, one of 16 bands has one of them at most.
assert MAX_HASH_DISTANCE < 2 * BANDS
MAX_SEARCHED = 1 << 16  # images that are looked up at once: about 1 KiB each
MAX_COMPARISONS = 1 << 30  # in a search: about a minute
COMPARED_AT_ONCE = 1 << 18
MIN_FOUND = 8  # if more than one in this many searched images was found, the rest is put into new tables

NONE = -1


def as_signatures(values: Sequence[bytes]) -> Signatures:
    """(images, SIGNATURE_BYTES) of signatures that are not empty."""
    return np.frombuffer(b"".join(values), np.uint8).reshape(-1, SIGNATURE_BYTES)


class NearDuplicates:
    """Searched images, at most MAX_SEARCHED, past which the images of the larger set are led.

    found: (images,) one of the larger set that looks like each, by the numbers that `add` was given; NONE.
    distances: (images,) bits in which their hashes differ.
    """

    def __init__(self, searched: Signatures, max_comparisons: int = MAX_COMPARISONS) -> None:
        assert len(searched) <= MAX_SEARCHED
        self.found: NDArray[np.int64] = np.full(len(searched), NONE)
        self.distances: NDArray[np.int64] = np.full(len(searched), NONE)
        self.comparisons_left = max_comparisons
        self._searched = searched
        self._index()

    def add(self, others: Signatures, numbers: NDArray[np.int64]) -> int:
        """Compare with further images. Returns how many of them were compared: fewer once MAX_COMPARISONS are spent."""
        bands = _bands(others)
        done = 0
        while done < len(others) and self.comparisons_left > 0:
            counts = sum((matches for _, matches in self._spans(bands[done:])), np.zeros(len(others) - done, np.int64))
            ahead = max(1, int(np.searchsorted(np.cumsum(counts), COMPARED_AT_ONCE)))
            rows = slice(done, done + ahead)
            self.comparisons_left -= int(counts[:ahead].sum())
            for places, images in self._pairs(bands[rows]):
                self._compare(places, others[rows][images], numbers[rows][images])
            done = min(len(others), rows.stop)
            if MIN_FOUND * int((self.found[self._in_tables] != NONE).sum()) > len(self._in_tables):
                self._index()  # thousands of near-duplicates are compared once
        return done

    def _index(self) -> None:
        """Tables of all images that were not found yet: of each band, images by its value or one bit from it."""
        self._in_tables = np.flatnonzero(self.found == NONE)
        bands = _bands(self._searched[self._in_tables])
        flips = np.array([0, *(1 << np.arange(BAND_BITS))], np.uint16)
        self._starts, self._images = [], []
        for band in bands.T:
            values = (band[:, None] ^ flips).ravel()
            order = np.argsort(values, kind="stable")
            self._starts.append(np.searchsorted(values[order], np.arange((1 << BAND_BITS) + 1)))
            self._images.append((order // len(flips)).astype(np.int32))

    def _spans(self, bands: NDArray[np.uint16]) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Yield (starts, counts) for each band: where the candidates of each image begin, and how many there are."""
        for starts, values in zip(self._starts, bands.astype(np.int64).T, strict=True):
            yield starts[values], starts[values + 1] - starts[values]

    def _pairs(self, bands: NDArray[np.uint16]) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Yield (searched, others) for each band: indexes of searched images and of the other images that share it."""
        for (starts, counts), images in zip(self._spans(bands), self._images, strict=True):
            others = np.repeat(np.arange(len(counts)), counts)
            within = np.arange(len(others)) - np.repeat(np.cumsum(counts) - counts, counts)
            yield self._in_tables[images[starts[others] + within]], others

    def _compare(self, places: NDArray[np.int64], others: Signatures, numbers: NDArray[np.int64]) -> None:
        """`others`, `numbers`: of each pair."""
        distances = hash_distance(self._searched[places], others)
        near = np.flatnonzero(distances <= MAX_HASH_DISTANCE)
        near = near[colour_distance(self._searched[places[near]], others[near]) <= MAX_COLOUR_DISTANCE]
        for pair in near[np.lexsort((numbers[near], distances[near]))].tolist():
            place = places[pair]
            if self.found[place] == NONE or distances[pair] < self.distances[place]:
                self.found[place], self.distances[place] = numbers[pair], distances[pair]


def _bands(signatures: Signatures) -> NDArray[np.uint16]:
    """(images, BANDS)"""
    return np.ascontiguousarray(signatures[:, :HASH_BYTES]).view(np.uint16)
