from __future__ import annotations

from typing import Any

import pytest

from vlmpipe.config.sections.tune import ParameterSpec


@pytest.mark.parametrize(
    ("spec", "extremes"),
    [
        ({"integer_value_spec": {"min_value": 32, "max_value": 64}}, [32, 33, 64]),
        ({"integer_value_spec": {"min_value": 1, "max_value": 2}}, [1, 2]),
        ({"integer_value_spec": {"min_value": 64, "max_value": 10**17}}, [64, 65, 10**17]),  # more than memory holds
        ({"double_value_spec": {"min_value": 8, "max_value": 64}}, [8, pytest.approx(25.8, abs=0.1), 64]),
        ({"discrete_value_spec": {"values": [8, 16, 32]}}, [8, 16, 32]),
        ({"categorical_value_spec": {"values": ["linear", "cosine"]}}, ["linear", "cosine"]),
    ],
)
def test_a_value_between_the_ends_is_checked_too(spec: dict[str, Any], extremes: list[Any]) -> None:
    assert ParameterSpec.model_validate(spec).extremes == extremes
