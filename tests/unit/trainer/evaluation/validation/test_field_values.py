"""Ranges of numbers as slices: every question is in one, equal numbers are together, and order changes nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlmpipe.trainer.evaluation.validation.field_values import MAX_NUMBERS, NUM_RANGES, grouped, holds, number_of


def members_of(values: Sequence[str]) -> dict[str, list[int]]:
    of_values: dict[str, list[int]] = defaultdict(list)
    for number, value in enumerate(values):
        of_values[value].append(number)
    return of_values


def sizes(values: Sequence[str]) -> dict[str, int]:
    return {name: len(group.members) for name, group in grouped(members_of(values)).items()}


def test_many_numbers_are_in_ranges_of_about_equal_shares() -> None:
    ages = [str(age) for age in range(18, 98)]
    assert sizes(ages) == {"18 to 37": 20, "38 to 57": 20, "58 to 77": 20, "78 to 97": 20}
    assert sizes([f"{0.5 * n:g}" for n in range(-20, 20)])["-10 to -5.5"] == 10


def test_few_numbers_and_texts_stay_as_they_are() -> None:
    months = [str(month % MAX_NUMBERS) for month in range(100)]
    assert sizes(months).keys() == set(months)
    cameras = [f"camera {n}" for n in range(40)]
    assert sizes(cameras).keys() == set(cameras)


def test_equal_numbers_are_never_apart() -> None:
    """Most are 0, which takes three of the four ranges; 7 and 7.0 are one number."""
    assert sizes(["0"] * 900 + [str(n) for n in range(1, 101)]) == {"0": 900, "1 to 100": 100}
    assert sizes(["7"] * 30 + ["7.0"] * 30 + [str(n) for n in range(8, 28)])["7"] == 60


def test_values_that_are_no_numbers_stay_slices_of_their_own() -> None:
    found = sizes([str(n) for n in range(40)] + ["nan"] * 3 + ["inf", "unknown", "1_0", "1e999"])
    assert found == {
        "0 to 9": 10, "10 to 19": 10, "20 to 29": 10, "30 to 39": 10,
        "nan": 3, "inf": 1, "unknown": 1, "1_0": 1, "1e999": 1,
    }  # fmt: skip
    assert number_of("-1.5e3") == -1500 and number_of("NaN") is None and number_of("") is None


def test_a_text_that_reads_like_a_range_joins_it() -> None:
    groups = grouped(members_of([str(n) for n in range(40)] + ["0 to 9"]))
    assert len(groups["0 to 9"].members) == 11 and holds("0 to 9", groups["0 to 9"].span, "0 to 9")


VALUES = st.lists(
    st.one_of(
        st.integers(-30, 60).map(str), st.floats(width=32).map(repr), st.sampled_from(["nan", "a", "b", "3", "3.0"])
    ),
    min_size=1,
    max_size=120,
)


@given(values=VALUES, seed=st.randoms(use_true_random=False))
def test_questions_are_in_one_slice_whatever_their_order(values: list[str], seed: object) -> None:
    groups = grouped(members_of(values))
    assert sorted(member for group in groups.values() for member in group.members) == list(range(len(values)))
    for name, group in groups.items():
        assert {number for number, value in enumerate(values) if holds(name, group.span, value)} == set(group.members)
    assert sum(group.span is not None for group in groups.values()) <= NUM_RANGES
    shuffled = values.copy()
    seed.shuffle(shuffled)  # type: ignore[attr-defined]
    assert sizes(shuffled) == sizes(values)


@pytest.mark.parametrize("value", [None, "5", "text"])
def test_a_slice_without_a_range_holds_its_value_alone(value: str | None) -> None:
    assert holds("5", None, value) == (value == "5")
