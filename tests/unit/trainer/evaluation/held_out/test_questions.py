"""Which turns of held-out samples are asked."""

from __future__ import annotations

from vlmpipe.trainer.data.sample import Turn
from vlmpipe.trainer.evaluation.held_out.questions import asked_turns

GOOD, UNLEARNED, SHOWN = Turn("A?", "B."), Turn("A?", "wrong", is_context=True), Turn("Show it.", "<image>")


def test_an_answer_that_was_no_label_is_not_asked() -> None:
    assert asked_turns([UNLEARNED, GOOD]) == [(1, GOOD)]


def test_samples_with_images_in_answers_are_not_asked() -> None:
    assert asked_turns([GOOD, SHOWN]) == []
