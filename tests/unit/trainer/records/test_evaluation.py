"""An evaluation is read whoever has written it: earlier versions, and programs of the user's own."""

from __future__ import annotations

import math

import pytest

from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.records.evaluation import Evaluation


def test_figures_of_a_program_of_ones_own_are_kept() -> None:
    content = {"exact_match": 0.5, "questions": 30.0, "bleu": 0.25, "files": ["a"], "loss": math.inf}
    found = Evaluation.of(content, "evaluate.json")
    assert (found.questions, found.figure("bleu"), found.figure("files"), found.figure("chance")) == (
        30,
        0.25,
        None,
        None,
    )
    assert found.as_json() == found.content() == content


@pytest.mark.parametrize("value", ["0.9", True, [0.9]])
def test_what_is_no_number_is_no_score(value: object) -> None:
    with pytest.raises(ConfigError, match="by exact_match"):
        Evaluation.of({"exact_match": value}, "evaluate.json")


def test_slices_of_controls_were_shares_once() -> None:
    control = {"exact_match": 0.2, "slices": {"digit": 0.3, "sum": {"exact_match": 0.1}, "none": None}}
    found = Evaluation.of({"controls": {"no_image": control}}, "evaluate.json").controls["no_image"].slices
    assert [one and one.exact_match for one in found.values()] == [0.3, 0.1, None]
