"""`vlmpipe gate`: margin and rates for the run's own number of questions."""

from __future__ import annotations

import json

import pytest

from tests.support.command_line import Vlmpipe


def test_the_rates_and_why_no_model_would_be_accepted(vlmpipe: Vlmpipe) -> None:
    """The screen is tests/fixtures/screens/gate.txt."""
    content = json.loads(vlmpipe("gate", "configs/digits.yaml", "--questions", "300", "--json").out)
    (equal,) = [one for one in content["accepted"] if one["difference"] == 0 and one["differing"] == 0.1]
    assert equal["accepted"] == pytest.approx(0.79, abs=0.02)
    none = vlmpipe("gate", "configs/digits.yaml", "gate=none", "--questions", "300")
    assert "every model is accepted" in none.out
    few = vlmpipe("gate", "configs/digits.yaml", "--questions", "20")
    assert "fewer than gate.min_questions, 50: no model is accepted" in few.out
