"""Refusals of samples that share a prefix, and the warning of a cap without any."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.paths import ROOT
from tests.support.pipelines.run_files import problems_of, small
from vlmpipe.config.run_config import load_run_file, warnings
from vlmpipe.config.validation_errors import Problem

PROGRAM = {"name": "plain", "command": ["python", "train.py"]}


@pytest.mark.parametrize(
    "changes",
    [
        {"data__pack": False},
        {"data__video": "native"},
        {"model__lora": {"dropout": 0.1}, "model__freeze": ["tower"]},
        {"train__strategy": "zero2"},
        {"train__context_parallel": 2},
        {"train__router_loss": 0.1},
        {"train__trainer": PROGRAM},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_settings_without_shared_prefixes_are_refused(changes: dict[str, Any]) -> None:
    fsdp = {"train__strategy": "fsdp"} | changes
    assert "data.share_prefix" in problems_of(data__share_prefix="on", **fsdp)


def test_strategies_and_adapters_that_share_are_taken() -> None:
    for strategy in ("ddp", "fsdp"):
        config = small(data__share_prefix="on", train__strategy=strategy, model__lora={}, model__freeze=["tower"])
        assert config.data.share_prefix


@pytest.mark.parametrize(("written", "meant"), [("true", "on"), ("false", "off"), ("on", "on"), ("off", "off")])
def test_a_run_file_may_switch_sharing_on_and_off_in_yamls_words(written: str, meant: str) -> None:
    config = load_run_file(ROOT / "configs/digits.yaml", [f"data.share_prefix={written}", "train.strategy=fsdp"])
    assert config.data.share_prefix == meant and config.to_dict()["data"]["share_prefix"] == meant


def test_a_cap_without_shared_prefixes_is_a_warning() -> None:
    fields = [problem.field for problem in warnings(small(data__max_questions_per_image=4))]
    assert "data.max_questions_per_image" in fields
    shared: list[Problem] = warnings(small(data__max_questions_per_image=4, data__share_prefix="on"))
    assert "data.max_questions_per_image" not in {problem.field for problem in shared}
