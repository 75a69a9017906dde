"""The laws of a sweep's intervals and tests."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlmpipe.comparison.sweep.intervals import LEVEL, pareto, resample
from vlmpipe.trainer.evaluation.significance.slices import holm

SAMPLES = [f"sample-{number}" for number in range(40)]


def noisy(share: float, starts: int, seed: int) -> list[list[float]]:
    chance = np.random.default_rng(seed)
    return (chance.random((starts, len(SAMPLES))) < share).astype(float).tolist()


@given(st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=4, max_size=4), min_size=2, max_size=3))
def test_an_accuracy_is_a_share(starts: list[list[float]]) -> None:
    low, high = resample({"a": starts}, ["x", "y", "z", "z"]).score("a").interval
    assert 0 <= low <= high <= 1


def test_a_variant_does_not_differ_from_itself_and_a_better_one_does() -> None:
    one = noisy(0.5, 3, 0)
    found = resample({"a": one, "same": one, "better": [[1.0] * len(SAMPLES)] * 3}, SAMPLES)
    same = found.difference("same", "a")
    assert same.value == 0
    assert same.interval[0] <= 0 <= same.interval[1]
    assert found.p_two_sided("same", "a") > 0.9
    better = found.difference("better", "a")
    assert better.interval[0] > 0.2
    assert found.p_two_sided("better", "a") < LEVEL  # three starts leave few degrees of freedom
    assert found.p_better("better", "a") < LEVEL < 0.9 < found.p_better("a", "better")


def test_a_margin_turns_no_worse_into_a_claim_that_can_be_shown() -> None:
    starts = [[1.0] * 39 + [0.0]] * 3
    found = resample({"all": [[1.0] * 40] * 3, "few": starts}, SAMPLES)
    assert found.p_better("few", "all") > 0.5
    assert found.p_better("few", "all", margin=0.2) < 0.001


def test_equal_starts_have_the_chance_of_questions_only() -> None:
    one = noisy(0.5, 1, 0)[0]
    alone, thrice = (resample({"a": [one] * starts}, SAMPLES).score("a") for starts in (1, 3))
    assert alone.interval == pytest.approx(thrice.interval, abs=0.01)
    low, high = alone.interval
    p = alone.value
    assert (high - low) / 2 == pytest.approx(1.96 * math.sqrt(p * (1 - p) / len(SAMPLES)), rel=0.15)


def test_starts_vary_as_much_as_their_deviation_says() -> None:
    # All questions alike, so that nothing but the starts varies: the interval is that of a mean of three.
    values = (0.45, 0.5, 0.55)
    found = resample({"a": [[value] * len(SAMPLES) for value in values]}, SAMPLES).score("a")
    half = 4.303 * np.std(values, ddof=1) / math.sqrt(3)  # Student's t with two degrees of freedom
    assert found.interval == pytest.approx((0.5 - half, 0.5 + half), abs=1e-3)


def test_what_questions_explain_is_not_counted_as_starts_too() -> None:
    """Starts that differ by their answers alone: a difference that questions show is not hidden by few starts."""
    chance, shown, false = np.random.default_rng(1), 0, 0
    for _ in range(60):
        samples = [str(number) for number in range(400)]
        scores = {
            name: [(chance.random(400) < share).astype(float).tolist() for _ in range(3)]
            for name, share in (("a", 0.6), ("same", 0.6), ("better", 0.7))
        }
        found = resample(scores, samples, 300)
        shown += found.p_two_sided("better", "a") < LEVEL
        false += found.p_two_sided("same", "a") < LEVEL
    assert shown >= 54 and false <= 7


def test_a_difference_says_how_large_one_could_have_been_seen() -> None:
    found = resample({"a": noisy(0.5, 3, 0), "b": noisy(0.5, 3, 1)}, SAMPLES).difference("a", "b")
    low, high = found.interval
    assert found.could_see and found.could_see > (high - low) / 2


@pytest.mark.parametrize("starts", [2, 3])
def test_equal_variants_rarely_differ_where_starts_vary_more_than_questions(starts: int) -> None:
    """22 and 13 % of such pairs did where few starts were taken to say all about how starts vary."""
    chance = np.random.default_rng(0)
    found = []
    for _ in range(150):
        scores = {name: [[chance.normal(0.5, 0.02)] * 4 for _ in range(starts)] for name in "ab"}
        found.append(resample(scores, list("wxyz")).p_two_sided("a", "b") < LEVEL)
    assert sum(found) / len(found) < 0.11


def test_questions_about_one_sample_are_drawn_together() -> None:
    scores = [[1.0] * 20 + [0.0] * 20]
    apart = resample({"a": scores}, SAMPLES).score("a").interval
    together = resample({"a": scores}, [f"{number // 10}" for number in range(40)]).score("a").interval
    assert together[1] - together[0] > 2 * (apart[1] - apart[0])


def test_one_image_tells_nothing_of_others() -> None:
    found = resample({"a": [[1.0] * 4, [0.0] * 4], "b": [[1.0] * 4]}, ["x"] * 4)
    assert found.score("b").interval == found.score("a").interval == (0.0, 1.0)
    assert found.difference("a", "b").interval == (-1.0, 1.0)
    other = resample({"a": [[7.0], [9.0]]}, ["x"]).score("a").interval
    assert other[0] < 7.0 < 9.0 < other[1], "of no share, the chance of starts"


@given(st.dictionaries(st.sampled_from("abcdefgh"), st.floats(0, 1), min_size=1, max_size=8))
def test_holm_lies_between_no_correction_and_bonferroni(p_values: dict[str, float]) -> None:
    corrected = holm(p_values)
    for name, value in p_values.items():
        assert value <= corrected[name] <= min(1.0, value * len(p_values)) + 1e-12
    ordered = sorted(p_values, key=p_values.__getitem__)
    assert [corrected[name] for name in ordered] == sorted(corrected.values())


def test_holm_is_that_of_a_worked_example() -> None:
    # Smallest times 4, next times 3, and so on, never below the one before.
    assert holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005}) == pytest.approx(
        {"a": 0.03, "b": 0.06, "c": 0.06, "d": 0.02}
    )


points = st.dictionaries(
    st.text(min_size=1, max_size=3), st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=9
)


@given(points)
def test_the_front_is_what_no_other_beats_at_its_cost(found: dict[str, tuple[int, int]]) -> None:
    front = pareto({name: (float(cost), float(score)) for name, (cost, score) in found.items()})
    assert front
    for name, (cost, score) in found.items():
        beaten = any(c <= cost and s >= score and (c < cost or s > score) for c, s in found.values())
        assert (name in front) != beaten
