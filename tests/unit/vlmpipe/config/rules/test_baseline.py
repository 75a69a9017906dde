"""Bounds on gain and forgetting of runs without a baseline or a probe are refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.pipelines.run_files import small
from vlmpipe.config.rules.baseline import baseline_problems
from vlmpipe.config.run_config import RunConfig

BOUNDS = {"gate__min_gain": 0.1, "gate__max_forgetting": 0.1}
FIELDS = ["gate.min_gain", "gate.max_forgetting"]
OPAQUE = {"name": "mine", "command": ["train"], "result": "opaque", "evaluate_command": ["evaluate"]}
WEIGHTS = {"model__projector": {"weights": "someone/model"}, "model__language_model": {"weights": "someone/model"}}


def found(config: RunConfig, *, later: bool = False) -> dict[str, str]:
    return {problem.field: problem.text for problem in baseline_problems(config, is_later_stage=later)}


def test_a_random_start_has_no_gain_and_forgets_nothing() -> None:
    problems = found(small(**BOUNDS))
    assert list(problems) == FIELDS
    assert "training starts from random weights" in problems["gate.min_gain"]
    assert not found(small(**BOUNDS), later=True), "a later stage starts from the export of the one before"
    assert not found(small(**BOUNDS, **WEIGHTS))
    assert not found(small()), "nothing is asked of a baseline"


@pytest.mark.parametrize(
    ("changes", "fields", "said"),
    [
        ({"evaluate__baseline": "off"}, FIELDS, "evaluate.baseline is off; expected auto"),
        ({"evaluate__retention": {"probe": "off"}}, FIELDS[1:], "evaluate.retention.probe off, which asks nothing"),
        ({"evaluate__retention": {"prompts": []}}, ["evaluate.retention.prompts"], "the probe has no question"),
        ({"train__trainer": OPAQUE}, FIELDS, "evaluate_command evaluates and asks no start weights"),
    ],
)
def test_what_is_not_asked_cannot_be_bounded(changes: dict[str, Any], fields: list[str], said: str) -> None:
    problems = found(small(**BOUNDS, **WEIGHTS, **changes))
    assert list(problems) == fields and all(said in text for text in problems.values())
