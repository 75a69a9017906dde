"""`vlmpipe gate`: margin and rates for the run's own number of questions."""

from __future__ import annotations

import json

import pytest

from tests.support.command_line import Vlmpipe


def test_the_command_prints_the_margin_and_the_rates(vlmpipe: Vlmpipe) -> None:
    answer = vlmpipe("gate", "configs/digits.yaml", "--questions", "300")
    assert "a drop of 4.54 points must be ruled out (gate.max_regression: auto)" in answer.out
    assert "+0 points" in answer.out and answer.code == 0
    content = json.loads(vlmpipe("gate", "configs/digits.yaml", "--questions", "300", "--json").out)
    (equal,) = [one for one in content["accepted"] if one["difference"] == 0 and one["differing"] == 0.1]
    assert equal["accepted"] == pytest.approx(0.79, abs=0.02)
    none = vlmpipe("gate", "configs/digits.yaml", "gate=none", "--questions", "300")
    assert "every model is accepted" in none.out
    few = vlmpipe("gate", "configs/digits.yaml", "--questions", "20")
    assert "fewer than gate.min_questions, 50: no model is accepted" in few.out
