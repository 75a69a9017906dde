"""The VQA evaluation's normalisation and its accuracy over ten answers, worked out by hand from its rules."""

from __future__ import annotations

import pytest

from vlmpipe.trainer.evaluation.vqa_answers import consensus, normalise_answer


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A Red  car\n", "red car"),
        ("the an a", ""),
        ("Two dogs", "2 dogs"),
        ("None", "0"),
        ("eleven", "eleven"),  # number words end at ten
        ("dont", "don't"),
        ("couldntve", "couldntve"),  # one apostrophe may be missing, not two
        ("couldnt've", "couldn't've"),
        ("Twas", "'twas"),
        ("ill", "ill"),  # no contraction in the list
        ("yes.", "yes"),
        ("2.5", "2.5"),
        ("U.S.", "us"),
        ("1,000 people", "1000 people"),
        ("black-white", "black white"),  # between letters a space
        ("black - white", "black white"),  # beside a space nothing
        ("10:30", "10:30"),  # a colon is kept
        ("red, blue", "red blue"),
        ("what?!", "what"),
    ],
)
def test_answers_are_normalised_by_the_rules(text: str, expected: str) -> None:
    assert normalise_answer(text) == expected


@pytest.mark.parametrize(
    ("right", "score"),
    [
        (0, 0.0),
        # Without one of the others (9 times) 1 of 3 needed, without the person himself (once) 0.
        (1, 9 / 10 * 1 / 3),
        (2, 8 / 10 * 2 / 3 + 2 / 10 * 1 / 3),
        (3, 7 / 10 * 1 + 3 / 10 * 2 / 3),
        (4, 1.0),
        (10, 1.0),
    ],
)
def test_accuracy_leaves_out_each_of_ten_people_in_turn(right: int, score: float) -> None:
    answers = ["A dog."] * right + [f"cat {number}" for number in range(10 - right)]
    assert consensus(answers, "dog") == pytest.approx(score)
