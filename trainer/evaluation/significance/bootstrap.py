"""Bootstrap intervals of scores. Questions about one image are drawn together, and the draws are the same each time."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vlmpipe.trainer.evaluation.significance.paired import student_quantile

RESAMPLES, SEED = 2000, 0
DRAWN_AT_ONCE = 1 << 18  # groups
CONFIDENCE = 0.95
MIN_GROUPS = 6  # with fewer, differences that all go one way are chance in more than 5 % of cases: 2 of 2^5

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
    draws, count = np.random.default_rng(SEED), len(sums)
    at_once = max(1, DRAWN_AT_ONCE // max(1, count))
    resampled = np.empty((RESAMPLES, sums.shape[1]))
    for first in range(0, RESAMPLES, at_once):
        rows = np.arange(min(at_once, RESAMPLES - first))
        # The generator's stream is the same for one array as for its rows one after the other.
        drawn = draws.integers(0, count, (len(rows), count)) + count * rows[:, None]
        times = np.bincount(drawn.reshape(-1), minlength=drawn.size).reshape(drawn.shape)
        for row in rows:  # one by one: a product of matrices would add in another order
            resampled[first + row] = times[row] @ sums
    return resampled


def interval(values: Float64Array, groups: int) -> tuple[float, float]:
    """The percentiles of a resampled score between which it lies with CONFIDENCE.

    Few groups resample too narrowly: the percentiles are those of Student's quantile and of the unbiased variance
    (Hesterberg 2015, What teachers should know about the bootstrap, The American Statistician 69: expanded
    percentiles). With one group the least and the largest value.
    """
    tail = 0.0
    if groups > 1:
        tail = 100 * NormalDist().cdf(-student_quantile((1 + CONFIDENCE) / 2, groups - 1) * unbiased(groups))
    low, high = np.percentile(values, [tail, 100 - tail])
    return float(low), float(high)


def difference_interval(difference: float, values: Float64Array, groups: int) -> tuple[float, float] | None:
    """Student's interval of a difference by its resampled variance; None of one group. Where few groups have many
    questions it holds its level, which percentiles do not."""
    if groups < 2:
        return None
    half = student_quantile((1 + CONFIDENCE) / 2, groups - 1) * float(values.std()) * unbiased(groups)
    return difference - half, difference + half


def unbiased(groups: int) -> float:
    """Factor from a resampled standard deviation to the unbiased one."""
    return math.sqrt(groups / (groups - 1))
