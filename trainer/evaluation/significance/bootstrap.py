"""Bootstrap intervals of scores. Questions about one image are drawn together, and the draws are the same each time."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

RESAMPLES, SEED = 2000, 0
CONFIDENCE = 0.95

Float64Array = NDArray[np.float64]


def resampled_sums(groups: Sequence[Hashable], tallies: ArrayLike) -> Float64Array:
    """Sums of tallies if the groups are drawn again, with replacement: (RESAMPLES, columns).

    groups: of each question, those that are drawn together: a model that misreads an image misses several questions at
        once.
    tallies: (questions, columns).
    """
    numbers = {group: number for number, group in enumerate(dict.fromkeys(groups))}
    values = np.asarray(tallies, np.float64)
    sums = np.zeros((len(numbers), values.shape[1]))
    np.add.at(sums, [numbers[group] for group in groups], values)
    draws = np.random.default_rng(SEED)
    count = len(sums)
    drawn = (np.bincount(draws.integers(0, count, count), minlength=count) for _ in range(RESAMPLES))
    return np.stack([times @ sums for times in drawn])


def interval(values: Float64Array) -> tuple[float, float]:
    """The percentiles between which CONFIDENCE of the values lie."""
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(values, [tail, 100 - tail])
    return float(low), float(high)
