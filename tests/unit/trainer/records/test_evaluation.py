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


def test_null_is_nothing_and_a_slice_may_be_a_share() -> None:
    nothing = dict.fromkeys(("slices", "paired", "controls", "benchmarks", "confusion", "champion"))
    assert Evaluation.of({**nothing, "bleu": None}, "evaluate.json") == Evaluation.of({"bleu": None}, "evaluate.json")
    found = Evaluation.of({"slices": {"digit": 0.3}, "benchmarks": {"a": {"scores": None}}}, "evaluate.json")
    assert (found.slices["digit"].exact_match, found.benchmarks["a"].scores) == (0.3, {})
