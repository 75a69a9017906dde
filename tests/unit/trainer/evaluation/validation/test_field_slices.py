"""Slices by fields of records: counts, what is said of fields that give none, and how often verdicts are wrong."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.support.short_form import WHOLE
from vlmpipe.trainer.data.accounting.keys import Record
from vlmpipe.trainer.data.conversations.slice_fields import fields_named
from vlmpipe.trainer.data.sample import Turn
from vlmpipe.trainer.data.shards.tar import sample_json, sample_of
from vlmpipe.trainer.evaluation.metrics import Prediction
from vlmpipe.trainer.evaluation.significance.slices import p_of_slice
from vlmpipe.trainer.evaluation.validation.field_slices import field_slices
from vlmpipe.trainer.evaluation.validation.field_values import MAX_VALUES
from vlmpipe.trainer.records.evaluation import Evaluation
from vlmpipe.trainer.records.evaluation_notes import evaluation_notes

TRIES, IMAGES = (2000, 60) if WHOLE else (150, 60)


def answered(number: int, correct: bool, **fields: str) -> Prediction:
    return Prediction(f"s{number}", 0, "all", "?", "a", "b", correct, "stop", f"image-{number}", tuple(fields.items()))


def test_fields_are_read_as_text_and_kept_in_shards() -> None:
    record = Record(
        {"camera": " rear ", "hour": 7, "lux": 0.25, "night": True, "tags": ["a"], "none": None, "nan": float("nan")}
    )
    names = ["camera", "hour", "lux", "night", "tags", "none", "nan", "unknown"]
    fields = fields_named(record, names)
    assert fields == (("camera", "rear"), ("hour", "7"), ("lux", "0.25"), ("night", "true"))
    assert record.used >= {"camera", "hour", "tags"}, "they count as read"
    turns = (Turn("?", "a", fields=fields), Turn("?", "b"))
    stored = sample_json("one", turns)
    assert sample_of(stored) == ("one", turns) and "fields" not in json.loads(stored)["turns"][1]


def test_large_numbers_with_a_fraction_and_without_one_stay_apart() -> None:
    """Whole numbers of a column where some are missing are read as numbers with a fraction."""
    values = [1000001.0, 1000002.0, 1234567.25, 1234567.5, 7.0, -0.0]
    shown = [dict(fields_named(Record({"id": value}), ["id"]))["id"] for value in values]
    assert shown == ["1000001", "1000002", "1234567.25", "1234567.5", "7", "0"]


def test_slices_are_sorted_by_what_they_cost() -> None:
    predictions = [
        answered(
            n, n % 10 > 3 * (n % 2), camera="rear" if n % 2 else "front", serial=f"no. {n}", age=str(n), one="same"
        )
        for n in range(200)
    ]
    found = field_slices(["camera", "serial", "age", "one", "nothing"], [*predictions, answered(200, True)])
    rear, front = found["camera"].slices
    assert (rear.value, front.value, found["camera"].without) == ("rear", "front", 1)
    assert (rear.questions, rear.errors, front.errors) == (100, 40, 20)
    assert rear.share_of_errors == pytest.approx(2 / 3) and rear.exact_match == pytest.approx(0.6)
    low, high = rear.exact_match_interval
    assert low < 0.6 < high and rear.verdict == "worse" and rear.p_corrected and rear.p_corrected < 0.05
    assert found["serial"].values == 200 > MAX_VALUES and not found["serial"].slices
    assert {part.value: part.questions for part in found["age"].slices} == {
        "0 to 49": 50, "50 to 99": 50, "100 to 149": 50, "150 to 199": 50
    }  # fmt: skip
    assert {part.span for part in found["age"].slices} == {(0, 49), (50, 99), (100, 149), (150, 199)}
    notes = evaluation_notes(
        Evaluation.model_validate({"by_field": {name: one.model_dump() for name, one in found.items()}})
    )
    assert notes == [
        "1 questions have no camera (data.slices), and are in none of its slices",
        "serial of data.slices gives no slices: it has 200 values in 201 questions, more than 50 slices: name one with "
        "fewer",
        "age of data.slices has 200 values: its numbers are shown in 4 ranges",
        "1 questions have no age (data.slices), and are in none of its slices",
        "one of data.slices gives no slices: all questions that have it have one value, 'same'",
        "nothing of data.slices gives no slices: no validation question has a text, a number or true or false in it",
    ]


def test_few_images_give_no_verdict() -> None:
    predictions = [answered(n % 5, bool(n % 2), camera="rear" if n % 5 < 2 else "front") for n in range(100)]
    assert {one.verdict for one in field_slices(["camera"], predictions)["camera"].slices} == {"too few images"}


@pytest.mark.parametrize("questions", [1, 6], ids=["a question an image", "six questions an image"])
def test_equal_slices_differ_as_rarely_as_is_said(questions: int) -> None:
    """Images differ in how hard they are. At most 5 % of tests are wrong, and some are; without a correction."""
    generator, wrong = np.random.default_rng(questions), 0
    groups = [image for image in range(IMAGES) for _ in range(questions)]
    for _ in range(TRIES):
        ease = generator.beta(3, 1, IMAGES).repeat(questions)
        right = (generator.random(len(groups)) < ease).tolist()
        is_in = (generator.random(IMAGES) < 0.25).repeat(questions).tolist()
        p = p_of_slice(groups, right, is_in)
        wrong += p is not None and p < 0.05
    assert 0.01 < wrong / TRIES < (0.065 if WHOLE else 0.09)
