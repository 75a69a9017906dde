"""Answers in words beside the expected ones: what the VQA evaluation and ANLS take as equal, and as close."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlmpipe.trainer.evaluation.metrics import (
    Prediction,
    anls,
    levenshtein,
    scores,
    vqa_accuracy,
)


@pytest.mark.parametrize(
    ("answer", "prediction", "expected"),
    [
        ("yes", "Yes.", 1),
        ("a red car", "the red car", 1),
        ("two", "2", 1),
        ("none", "0", 1),
        ("don't", "dont", 1),
        ("don\N{RIGHT SINGLE QUOTATION MARK}t", "don't", 1),
        ("1,000", "1000", 1),
        ("black-white", "black white", 1),
        ("2.5", "2.5", 1),
        ("2.5", "25", 0),
        ("red", "red car", 0),
        ("3", "2", 0),
        ("", "", 1),
    ],
)
def test_vqa_accuracy_ignores_punctuation_articles_and_number_words(
    answer: str, prediction: str, expected: float
) -> None:
    assert vqa_accuracy(answer, prediction) == vqa_accuracy(prediction, answer) == expected


@pytest.mark.parametrize(
    ("answer", "prediction", "expected"),
    [
        ("Hotel Astoria", "hotel  astoria", 1.0),
        ("invoice", "invoise", 6 / 7),
        ("1234", "1299", 0.0),
        ("1234", "9999", 0.0),
        ("abc", "", 0.0),
        ("", "", 1.0),
    ],
)
def test_anls_tolerates_errors_below_one_half(answer: str, prediction: str, expected: float) -> None:
    assert anls(answer, prediction) == pytest.approx(expected)


WORDS = st.text("abc ", max_size=8)


@given(WORDS, WORDS, WORDS)
def test_levenshtein_is_a_distance(one: str, other: str, third: str) -> None:
    assert (levenshtein(one, other) == 0) == (one == other)
    assert levenshtein(one, other) == levenshtein(other, one)
    assert levenshtein(one, third) <= levenshtein(one, other) + levenshtein(other, third)
    assert abs(len(one) - len(other)) <= levenshtein(one, other) <= max(len(one), len(other))


def test_scores_are_means_overall_and_of_each_slice() -> None:
    def answered(slice_: str, answer: str, prediction: str) -> Prediction:
        return Prediction("a", 0, slice_, "q", answer, prediction, correct=answer == prediction)

    found = scores([answered("color", "red", "red"), answered("color", "red", "rod"), answered("count", "two", "2")])
    assert found["exact_match"] == pytest.approx(1 / 3)
    assert found["vqa_accuracy"] == pytest.approx(2 / 3)
    assert found["anls"] == pytest.approx((1 + 2 / 3) / 3)
    assert found["slices"]["count"] == {"questions": 1, "exact_match": 0.0, "vqa_accuracy": 1.0, "anls": 0.0}
    assert scores([])["anls"] is None
