"""Which turns of held-out samples are asked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Literal

import pytest

from vlmpipe.trainer.data.sample import Turn
from vlmpipe.trainer.evaluation.held_out.questions import HeldOut, asked_turns
from vlmpipe.trainer.evaluation.metrics import image_group

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
    asked = HeldOut(split, shards).questions(0, earlier_turns)
    assert [one.images for one in asked] == images
    assert {one.image_group for one in asked} == {image_group("another", ["x", "y"])}


def test_questions_of_the_same_images_are_one_group_and_those_without_are_their_samples() -> None:
    groups = [image_group("one", images) for images in (["x"], ["y"], ["x", "y"], ["xy"], [])]
    assert len(set(groups)) == 5 and groups[0] == "x" and groups[-1] == "one"
