"""Nearest vectors of each vector by cosine: exact, by blocks of rows, in memory that does not grow with the product."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Vectors = NDArray[np.float32]  # (rows, width), of length 1

BLOCK_ROWS = 1024  # against COLUMN_ROWS others at a time: 16 MiB of cosines
COLUMN_ROWS = 4096


@dataclass(frozen=True)
class Neighbours:
    """Rows nearest to each row, nearest first. rows: (rows, k), -1 where there are fewer. cosines: (rows, k)."""

    rows: NDArray[np.int64]
    cosines: NDArray[np.float32]

    def pairs(self) -> NDArray[np.int64]:
        """(pairs, 2) each pair of rows once, in order, the smaller row first."""
        total, count = self.rows.shape
        first, second = np.repeat(np.arange(total), count), self.rows.ravel()
        first, second = first[second >= 0], second[second >= 0]
        numbers = np.unique(np.minimum(first, second) * total + np.maximum(first, second))
        return np.stack(np.divmod(numbers, max(1, total)), axis=1)


def as_directions(vectors: NDArray[np.floating]) -> Vectors:
    """The vectors less their mean, of length 1: what they share says nothing. Rows of zero stay so."""
    centred = vectors.astype(np.float32) - vectors.mean(axis=0, dtype=np.float64).astype(np.float32)
    lengths = np.linalg.norm(centred, axis=1, keepdims=True)
    directions: Vectors = np.divide(centred, lengths, out=np.zeros_like(centred), where=lengths > 0)
    return directions


def nearest(vectors: Vectors, count: int) -> Neighbours:
    """The `count` nearest other rows of each row. Of equal cosines the rows with smaller numbers."""
    total = len(vectors)
    count = max(0, min(count, total - 1))
    rows = np.full((total, count), -1, np.int64)
    cosines = np.full((total, count), -np.inf, np.float32)
    if not count:
        return Neighbours(rows, cosines)
    for start in range(0, total, BLOCK_ROWS):
        block = slice(start, min(start + BLOCK_ROWS, total))
        for first in range(0, total, COLUMN_ROWS):
            products = vectors[block] @ vectors[first : first + COLUMN_ROWS].T
            itself = np.arange(block.start, block.stop)
            is_there = (itself >= first) & (itself < first + products.shape[1])
            products[np.flatnonzero(is_there), itself[is_there] - first] = -np.inf
            _merge(rows[block], cosines[block], products, first)
    return Neighbours(rows, cosines)


def _merge(rows: NDArray[np.int64], cosines: NDArray[np.float32], products: NDArray[np.float32], first: int) -> None:
    """Merge nearer rows of a further block of columns into the rows found so far."""
    count = rows.shape[1]
    num_nearest = min(count, products.shape[1])
    places = np.argpartition(-products, num_nearest - 1, axis=1)[:, :num_nearest]
    places.sort(axis=1)
    joined_rows = np.concatenate([rows, places + first], axis=1)
    joined = np.concatenate([cosines, np.take_along_axis(products, places, axis=1)], axis=1)
    order = np.argsort(-joined, axis=1, kind="stable")[:, :count]
    rows[:] = np.take_along_axis(joined_rows, order, axis=1)
    cosines[:] = np.take_along_axis(joined, order, axis=1)
