"""Intervals by the bootstrap, where questions gather on few images."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from vlmpipe.trainer.evaluation.significance.bootstrap import (
    MIN_GROUPS,
    RESAMPLES,
    SEED,
    difference_interval,
    interval,
    resampled_sums,
)


@pytest.mark.parametrize("groups", [2, 6, 12, 300])
def test_a_difference_has_students_interval_of_its_groups(groups: int) -> None:
    """Ten questions of each group: the interval is that of a t test of the groups' means."""
    values = np.random.default_rng(groups).choice([-1.0, 0.0, 1.0], (groups, 10))
    sums = resampled_sums(np.repeat(np.arange(groups), 10).tolist(), values.reshape(-1, 1))[:, 0] / values.size
    means = values.mean(axis=1)
    half = stats.t.ppf(0.975, groups - 1) * means.std(ddof=1) / math.sqrt(groups)
    found = difference_interval(float(means.mean()), sums, groups)
    assert found == pytest.approx((means.mean() - half, means.mean() + half), abs=0.06 * half)
    assert difference_interval(0.5, sums, 1) is None


@pytest.mark.parametrize("groups", [2, 6, 40, 1000])
def test_a_scores_percentiles_are_wider_for_few_groups(groups: int) -> None:
    values = np.random.default_rng(0).normal(size=200_000)
    low, high = interval(values, groups)
    expected = stats.t.ppf(0.975, groups - 1) * math.sqrt(groups / (groups - 1))
    assert -low == pytest.approx(min(expected, -values.min()), rel=0.03)
    assert high == pytest.approx(min(expected, values.max()), rel=0.03)
    assert interval(values, 1) == (values.min(), values.max())


def test_fewer_groups_than_the_least_differ_one_way_by_chance_too_often() -> None:
    assert 2 * 0.5**MIN_GROUPS < 0.05 <= 2 * 0.5 ** (MIN_GROUPS - 1)


def test_the_questions_of_a_group_are_drawn_together() -> None:
    sums = resampled_sums(["a", "a", "b", "b"], [[1.0], [0.0], [0.0], [1.0]])
    assert sums.shape == (RESAMPLES, 1) and set(sums[:, 0]) == {2.0}


@pytest.mark.parametrize("count", [1, 7, 300])
def test_resamples_are_drawn_one_after_the_other(count: int) -> None:
    """Bit for bit, so that an evaluation's intervals do not change with how many are drawn at once."""
    groups = np.arange(2 * count) % count
    tallies = np.random.default_rng(1).random((2 * count, 3))
    sums = np.add.reduceat(tallies[np.argsort(groups, kind="stable")], np.arange(count) * 2)
    draws = np.random.default_rng(SEED)
    expected = [np.bincount(draws.integers(0, count, count), minlength=count) @ sums for _ in range(RESAMPLES)]
    assert (resampled_sums(groups.tolist(), tallies) == expected).all()
