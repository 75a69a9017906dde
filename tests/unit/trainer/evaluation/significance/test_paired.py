"""The paired test: its statistic, its level by exact enumeration, and what groups of questions cost."""

from __future__ import annotations

import math
import random
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from vlmpipe.trainer.evaluation.significance.paired import (
    LEVEL,
    MAX_DEFAULT_MARGIN,
    PairedCounts,
    critical_value,
    default_margin,
    interval,
    is_above,
    paired_counts,
    score_statistic,
    share_interval,
    student_quantile,
)

counts = st.builds(
    lambda model, other, both, effect: PairedCounts(
        questions=model + other + both, only_model=model, only_other=other, images=30, design_effect=effect
    ),
    st.integers(0, 40),
    st.integers(0, 40),
    st.integers(1, 200),
    st.floats(1, 4),
)


def independent(questions: int, only_model: int, only_other: int) -> PairedCounts:
    return PairedCounts(questions=questions, only_model=only_model, only_other=only_other, images=questions)


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 8, 19, 50, 399])
@pytest.mark.parametrize("share", [0.9, 0.95, 0.975, 0.999])
def test_students_quantile_is_that_of_scipy(share: float, freedom: int) -> None:
    assert student_quantile(share, freedom) == pytest.approx(stats.t.ppf(share, freedom), rel=1e-6)


def test_from_400_degrees_of_freedom_the_normal_quantile_is_taken() -> None:
    assert student_quantile(0.95, 400) == pytest.approx(stats.t.ppf(0.95, 400), rel=3e-3)


@given(st.integers(0, 60), st.integers(0, 60), st.integers(0, 300))
def test_of_no_difference_the_statistic_is_mcnemars(model: int, other: int, both: int) -> None:
    expected = (model - other) / math.sqrt(model + other) if model + other else 0.0
    assert score_statistic(independent(model + other + both, model, other), 0.0) == pytest.approx(expected, abs=1e-9)


def test_the_closed_form_is_the_maximum_of_the_likelihood() -> None:
    """One discordant pair of 44, with the share that is no question of the test found by search."""
    low, high = interval(independent(44, 1, 0), level=0.025)

    def profile(difference: float) -> float:
        """The same statistic with the nuisance share found by search, not by its closed form."""
        grid = [max(0.0, -difference) + k * 1e-5 for k in range(1, 60000)]

        def likelihood(share: float) -> float:
            more, rest = share + difference, 1 - 2 * share - difference
            if more <= 0 or rest <= 0:
                return -math.inf
            return math.log(more) + 43 * math.log(rest)

        share = max(grid, key=likelihood)
        return (1 / 44 - difference) / math.sqrt((2 * share + difference * (1 - difference)) / 44)

    bound = critical_value(44, 0.025)
    assert profile(low) == pytest.approx(bound, abs=0.02)
    assert profile(high) == pytest.approx(-bound, abs=0.02)


@given(counts, st.floats(-0.9, 0.9))
def test_the_interval_ends_where_the_test_changes_its_mind(found: PairedCounts, difference: float) -> None:
    low, high = interval(found)
    assert -1 <= low <= found.difference + 1e-6 and found.difference - 1e-6 <= high <= 1
    if abs(difference - low) > 1e-6:
        assert is_above(found, difference) == (difference < low)


@given(counts, st.integers(1, 10))
def test_more_right_answers_never_hide_a_difference(found: PairedCounts, more: int) -> None:
    better = found.model_copy(update={"only_other": max(0, found.only_other - more)})
    assert interval(better)[0] >= interval(found)[0] - 1e-9


@given(counts)
def test_sides_are_exchangeable(found: PairedCounts) -> None:
    turned = found.model_copy(update={"only_model": found.only_other, "only_other": found.only_model})
    low, high = interval(found)
    assert interval(turned) == pytest.approx((-high, -low), abs=1e-6)


@cache
def acceptance(questions: int, differing: float, difference: float, margin: float) -> float:
    """Exactly how often the test rules out the margin, over all outcomes of independent questions."""
    total = 0.0
    share = (differing + difference) / 2 / differing
    for differ in range(questions + 1):
        weight = float(stats.binom.pmf(differ, questions, differing))
        if weight < 1e-9:
            continue
        least = next(
            (k for k in range(differ + 1) if is_above(independent(questions, k, differ - k), -margin)), differ + 1
        )
        total += weight * float(stats.binom.sf(least - 1, differ, share))
    return total


@pytest.mark.parametrize(("questions", "differing"), [(60, 0.12), (60, 0.3), (200, 0.06), (200, 0.2)])
def test_a_model_worse_by_the_margin_passes_at_the_level_at_most(questions: int, differing: float) -> None:
    margin = default_margin(questions)
    assert acceptance(questions, differing, -margin, margin) <= LEVEL + 0.005


def test_the_default_margin_lets_an_equal_model_pass_as_often_as_it_says() -> None:
    assert acceptance(200, 0.1, 0.0, default_margin(200)) == pytest.approx(0.8, abs=0.05)
    assert default_margin(1) == MAX_DEFAULT_MARGIN and default_margin(20_000) < 0.006


def test_three_questions_show_nothing() -> None:
    assert not is_above(independent(3, 3, 0), -0.1)
    assert interval(independent(0, 0, 0)) == (-1.0, 1.0)
    assert not is_above(independent(0, 0, 0), -1.0)


def test_questions_about_one_image_are_no_independent_evidence() -> None:
    draws = random.Random(1)
    outcomes = [draws.choice([(True, False), (False, True), (True, True)]) for _ in range(200)]
    alone = paired_counts(range(200), *zip(*outcomes, strict=True))
    repeated = [one for one in outcomes for _ in range(9)]
    together = paired_counts([n // 9 for n in range(1800)], *zip(*repeated, strict=True))
    assert alone.design_effect == 1.0 and together.images == 200
    assert together.design_effect == pytest.approx(9.0, rel=0.02)
    assert interval(together) == pytest.approx(interval(alone), abs=0.002)


def test_few_disagreements_are_taken_to_gather_on_images() -> None:
    same = [True] * 40
    assert paired_counts([n // 4 for n in range(40)], same, same).design_effect == 4.0
    assert paired_counts(["one"] * 40, same, same) == PairedCounts(
        questions=40, only_model=0, only_other=0, images=1, design_effect=40.0
    )
    assert math.isinf(critical_value(1))


def test_few_images_do_not_pass_by_chance() -> None:
    """Three to eight images of ten questions each, whose questions go the same way: 14 % passed by the bootstrap."""
    draws, passed = random.Random(0), 0
    for _ in range(600):
        groups, model, other = [], [], []
        for image in range(draws.choice([3, 5, 8])):
            share = draws.choice([0.2, 0.8])
            for _ in range(10):
                groups.append(image)
                model.append(draws.random() < share)
                other.append(draws.random() < 1 - share)
        passed += is_above(paired_counts(groups, model, other), 0.0)
    assert passed / 600 <= LEVEL + 0.02


@given(st.lists(st.booleans(), min_size=2, max_size=300), st.integers(1, 5))
def test_a_shares_interval_holds_it(right: list[bool], each: int) -> None:
    low, high = share_interval([number // each for number in range(len(right))], right)
    assert 0 <= low <= sum(right) / len(right) + 1e-12 and sum(right) / len(right) - 1e-12 <= high <= 1


def test_of_independent_questions_a_shares_interval_is_wilsons() -> None:
    # Newcombe, Statistics in Medicine 17 (1998), table I: 81 of 263, by the normal quantile.
    low, high = share_interval(range(263), [number < 81 for number in range(263)])
    assert (low, high) == pytest.approx((0.2553, 0.3662), abs=6e-4)
