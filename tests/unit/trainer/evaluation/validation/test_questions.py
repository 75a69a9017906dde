"""Which turns of validation samples are asked."""

from __future__ import annotations

from collections import Counter
from itertools import groupby
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from vlmpipe.trainer.data.sample import DEFAULT_SLICE, Turn
from vlmpipe.trainer.evaluation.metrics import Prediction, Question, baseline_answers, exact_match, image_group
from vlmpipe.trainer.evaluation.validation.questions import ValidationSplit, asked_turns, by_text, shares_of

GOOD, UNLEARNED, SHOWN = Turn("A?", "B."), Turn("A?", "wrong", is_context=True), Turn("Show it.", "<image>")


def test_an_answer_that_was_no_label_is_not_asked() -> None:
    assert asked_turns([UNLEARNED, GOOD]) == [(1, GOOD)]


def test_samples_with_images_in_answers_are_not_asked() -> None:
    assert asked_turns([GOOD, SHOWN]) == []


class OneSample(SimpleNamespace):
    """A split of one sample."""

    def __len__(self) -> int:
        return 1


@pytest.mark.parametrize(("earlier_turns", "images"), [("reference", [1, 2]), ("none", [None, None])])
def test_a_turn_sees_the_images_up_to_it_as_in_training(
    earlier_turns: Literal["reference", "none"], images: list[int | None]
) -> None:
    turns = [Turn("<image>\nWhat is it?", "A cat."), Turn("<image>\nAnd this?", "A dog.")]
    split: Any = OneSample(ids=["one"], sample_location=lambda number: number, image_sha256=lambda _: ["x", "y"])
    shards: Any = SimpleNamespace(turns=lambda _place: turns)
    asked = ValidationSplit(split, shards).questions(0, earlier_turns)
    assert [one.images for one in asked] == images
    assert {one.image_group for one in asked} == {image_group("another", ["x", "y"])}


def test_questions_of_the_same_images_are_one_group_and_those_without_are_their_samples() -> None:
    groups = [image_group("one", images) for images in (["x"], ["y"], ["x", "y"], ["xy"], [])]
    assert len(set(groups)) == 5 and groups[0] == "x" and groups[-1] == "one"


def asked(*texts: str, times: int = 6, slice_: str = DEFAULT_SLICE) -> list[Question]:
    rows = [(f"s{number}", text) for number in range(times) for text in texts]
    return [Question(0, sample, 0, slice_, f"<image>\n{text}", "yes") for sample, text in rows]


def test_few_questions_that_are_asked_again_and_again_are_scored_one_by_one() -> None:
    found = by_text(asked("Is it a mug?", "What  colour is it?"))
    assert Counter(one.slice for one in found) == {"Is it a mug?": 6, "What colour is it?": 6}
    always_yes = [
        Prediction(one.id, 0, one.slice, one.question, "yes", "yes", "mug" in one.question, "stop") for one in found
    ]
    scored = exact_match(always_yes)
    assert {name: one["exact_match"] for name, one in scored["slices"].items()} == {
        "Is it a mug?": 1.0,
        "What colour is it?": 0.0,
    }


@pytest.mark.parametrize(
    "questions",
    [
        asked("Is it a mug?"),  # one question: all questions are the same number
        asked("Is it a mug?", "What is it?", times=3),  # too few of each to say anything
        asked(*(f"Is it number {number}?" for number in range(13))),
        asked("Is it a mug?", "a" * 90),
        asked("Is it a mug?", ""),
        asked("Is it a mug?", "What is it?", slice_="kitchen"),  # the records name slices
    ],
)
def test_other_questions_keep_their_slices(questions: list[Question]) -> None:
    assert by_text(list(questions)) == questions


def test_the_baseline_of_a_question_is_that_of_its_text_also_where_it_is_its_slice() -> None:
    training = {"question_answers": {"Is it a mug?": "yes"}, "majority_answer": "red"}
    found = by_text(asked("Is it a mug?", "What is it?"))
    assert baseline_answers(found, {DEFAULT_SLICE: training}) == [True, False] * 6
    rare = {"question_answers": {"Is it a mug?": "no"}, "majority_answer": "blue"}  # of no validation sample
    assert baseline_answers(found, {DEFAULT_SLICE: training, "kitchen": rare}) == [True, False] * 6
    assert baseline_answers(found, {"kitchen": training, DEFAULT_SLICE: {}}) == [False] * 12


def test_ranks_get_the_questions_about_an_image_together_and_as_many_as_can_be() -> None:
    about = [number // 5 for number in range(40)] + [9] * 7  # the last image has more than a batch
    questions = [
        Question(number, f"s{number}", 0, DEFAULT_SLICE, "?", "yes", image_group=f"image {image}")
        for number, image in enumerate(about)
    ]
    shares = shares_of(questions, 3, 5)
    assert sorted(one.sample for share in shares for one in share) == list(range(47))
    assert {len(share) for share in shares} <= {15, 17}
    for share in shares:
        runs = [group for group, _ in groupby(share, key=lambda one: one.image_group)]
        assert len(runs) == len(set(runs)), "questions about an image follow each other"
    assert [[one.sample for one in share] for share in shares_of(questions[:40:5], 2, 5)] == [
        [0, 10, 20, 30],
        [5, 15, 25, 35],
    ]
