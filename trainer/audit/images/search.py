"""Nearest vectors of each vector: exact, or by an index that finds nearly all of them where there are too many."""

from __future__ import annotations

import importlib.util

import numpy as np
import torch
from numpy.typing import NDArray

from vlmpipe.trainer.audit.images.neighbours import Neighbours, Vectors, nearest

MAX_EXACT = 1 << 18  # vectors that are compared with each other, which takes time by the square of their number
MAX_INDEXED = 1 << 22  # vectors that the index of the extra takes: some 1 KiB each beside themselves
EXTRA = "large-audit"
INDEX_PACKAGE = "usearch"
CONNECTIONS, SEEN_ADDING, SEEN_SEARCHING = 16, 128, 64  # of a vector in the graph, and vectors kept on a way through it
AT_ONCE = 1 << 14


def has_index() -> bool:
    """Return whether the extra is installed."""
    return importlib.util.find_spec(INDEX_PACKAGE) is not None


def max_compared() -> int:
    """The number of vectors above which the rest is left out."""
    return MAX_INDEXED if has_index() else MAX_EXACT


def search(vectors: Vectors, count: int) -> Neighbours:
    """The `count` nearest other rows of each of at most `max_compared` rows; exact up to MAX_EXACT."""
    assert len(vectors) <= max_compared()
    return nearest(vectors, count) if len(vectors) <= MAX_EXACT else nearly_nearest(vectors, count)


def nearly_nearest(vectors: Vectors, count: int) -> Neighbours:
    """Nearly the `count` nearest other rows of each row, the same in each call; none of and for rows of zero.

    Time grows little faster than the number of rows: a navigable small-world graph, Malkov and Yashunin 2016, Efficient
    and robust approximate nearest neighbor search using hierarchical navigable small world graphs.
    """
    from usearch.index import Index

    total, width = vectors.shape
    index = Index(
        ndim=width,
        metric="cos",
        dtype="f16",
        connectivity=CONNECTIONS,
        expansion_add=SEEN_ADDING,
        expansion_search=SEEN_SEARCHING,
    )
    neighbours = Neighbours(np.full((total, count), -1, np.int64), np.full((total, count), -np.inf, np.float32))
    blocks = [_directed(vectors, start) for start in range(0, total, AT_ONCE)]
    for rows in blocks:
        index.add(rows, vectors[rows], threads=1)  # several threads would make another graph in each call
    for rows in filter(len, blocks):
        asked = rows if len(rows) > 1 else np.repeat(rows, 2)  # of one vector the answer has another form
        matches = index.search(vectors[asked], count + 1, threads=torch.get_num_threads())
        others = matches.keys[: len(rows)].astype(np.int64)
        is_there = np.arange(others.shape[1]) < matches.counts[: len(rows), None]
        is_there &= others != rows[:, None]
        order = np.argsort(~is_there, axis=1, kind="stable")[:, :count]
        distances = np.where(is_there, matches.distances[: len(rows)], np.inf)
        _put(neighbours.rows, rows, np.where(is_there, others, -1), order)
        _put(neighbours.cosines, rows, 1 - distances, order)
    return neighbours


def _directed(vectors: Vectors, start: int) -> NDArray[np.int64]:
    """The rows of a block that are not zero."""
    return start + np.flatnonzero(vectors[start : start + AT_ONCE].any(axis=1))


def _put(
    table: NDArray[np.generic], rows: NDArray[np.int64], values: NDArray[np.generic], order: NDArray[np.int64]
) -> None:
    """Keep the first values of each row in this order; there may be fewer than are kept."""
    table[rows, : order.shape[1]] = np.take_along_axis(values, order, axis=1)
