"""What a run's record of its capacity options is read as."""

from __future__ import annotations

import pytest

from vlmpipe.runs.capacity_attempts import Attempt, parse_attempts
from vlmpipe.trainer.errors import ConfigError

SPOT = {"strategy": "spot", "token": "t", "outcome": "no capacity", "usd": 0.5}


def test_a_field_of_a_later_version_is_left_out() -> None:
    content = {"of_run": "1", "attempts": [SPOT | {"of_a_later_version": 1}]}
    assert parse_attempts(content, "1") == (Attempt("spot", "t", outcome="no capacity", usd=0.5),)
    assert parse_attempts(content, "2") == ()


def test_a_field_of_another_type_is_refused_by_its_name() -> None:
    with pytest.raises(ConfigError, match=r"capacity_fallback\.json is not of this version of vlmpipe, by 0\.usd"):
        parse_attempts({"of_run": "1", "attempts": [SPOT | {"usd": "much"}]}, "1")
