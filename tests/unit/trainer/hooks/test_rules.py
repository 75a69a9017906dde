"""Rules of features refuse, and warn of, what does not go with the feature."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.pipelines.run_files import problems_of, small
from vlmpipe.config.run_config import warnings

PAIRS = {"train__objective": "dpo", "train__validate_every_steps": 0}
FLOAT8 = {"train__strategy": "fsdp", "train__float8": "rowwise", "train__precision": "bf16"}
DORA = {"model__lora": {"use_dora": True}, "model__freeze": ["tower"]}


@pytest.mark.parametrize(
    ("changes", "field", "text"),
    [
        (PAIRS | {"data__turns": "independent"}, "data.turns", "whose pairs end a conversation; expected conversation"),
        (PAIRS | {"evaluate__quantize": {"formats": ["int4"]}}, "evaluate.quantize", "expected sft, or null here"),
        (FLOAT8 | DORA, "train.float8", "found rowwise with model.lora.use_dora"),
    ],
    ids=lambda value: value if isinstance(value, str) and "." in value else "",
)
def test_a_feature_refuses_what_does_not_go_with_it(changes: dict[str, Any], field: str, text: str) -> None:
    assert text in problems_of(**changes)[field]


@pytest.mark.parametrize(("recipe", "warns"), [("none", False), ("rowwise", True)])
def test_float8_without_gpus_is_a_warning(recipe: str, warns: bool) -> None:
    assert warns == ("train.float8" in {doubt.field for doubt in warnings(small(**FLOAT8 | {"train__float8": recipe}))})
