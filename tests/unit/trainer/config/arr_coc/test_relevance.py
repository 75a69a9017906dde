"""What `check` says of a relevance section that could not work."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from tests.support.trainer.tiny_native import model_section
from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.models.image_tokens import image_form_of

FROZEN = ("tower", "projector", "language_model")


@pytest.mark.parametrize(
    ("relevance", "said"),
    [
        ({"channels": ["rbg"], "max_tokens": 4}, "did you mean rgb"),
        ({}, "needs max_tokens"),
        ({"max_tokens": 4, "min_tokens": 9}, "min_tokens 9 is more than max_tokens 4"),
        ({"allocation": "full"}, "estimator rloo could not learn"),
        ({"allocation": "full", "max_tokens": 3, "estimator": "none"}, "leave max_tokens out"),
        ({"allocation": "random", "max_tokens": 4}, "ignores relevance"),
        ({"max_tokens": 4, "scorers": ["perspectival"], "balancer": "fixed"}, "nothing to learn"),
    ],
)
def test_a_section_that_could_not_work_is_refused(relevance: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        ModelConfig.model_validate(model_section("qwen3_vl", freeze=FROZEN, relevance=relevance))


def test_other_families_have_no_grid_to_select_from() -> None:
    with pytest.raises(ValidationError, match="not apply to family smolvlm"):
        ModelConfig.model_validate(model_section("smolvlm", relevance={"max_tokens": 4}))


def test_a_budget_larger_than_the_grid_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_tokens 33 is more than the 32 tokens of the largest image"):
        image_form_of(ModelConfig.model_validate(model_section("qwen3_vl", relevance={"max_tokens": 33})))
