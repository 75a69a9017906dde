"""Refusals of samples that share a prefix, and the warning of a cap without any."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.paths import ROOT
from tests.support.pipelines.run_files import problems_of, small
from tests.support.trainer.tiny_runs import strategy_changes
from vlmpipe.config.run_config import load_run_file, warnings
from vlmpipe.config.validation_errors import Problem
from vlmpipe.trainer.config.strategies import ABILITIES

PROGRAM = {"name": "plain", "command": ["python", "train.py"]}


@pytest.mark.parametrize(
    "changes",
    [
        {"data__pack": False},
        {"model__lora": {"dropout": 0.1}, "model__freeze": ["tower"]},
        {"train__router_loss": 0.1},
        {"train__trainer": PROGRAM},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_settings_without_shared_prefixes_are_refused(changes: dict[str, Any]) -> None:
    fsdp = {"train__strategy": "fsdp"} | changes
    assert "data.share_prefix" in problems_of(data__share_prefix="on", **fsdp)


def test_a_refusal_says_what_separate_samples_cost() -> None:
    found = problems_of(data__share_prefix="on", data__pack=False)["data.share_prefix"]
    assert "With off, 10 questions about an image then take 1.6 times as long with 16 image tokens" in found


@pytest.mark.parametrize("strategy", ABILITIES)
def test_every_strategy_shares_with_adapters_too(strategy: str) -> None:
    changes = {name.replace(".", "__"): value for name, value in strategy_changes(strategy).items()}
    ranks = {"cluster": {"replica_count": 2, "processes_per_replica": 2}}
    config = small(data__share_prefix="on", model__lora={}, model__freeze=["tower"], **ranks, **changes)
    assert config.data.share_prefix == "on"


@pytest.mark.parametrize(("written", "meant"), [("true", "on"), ("false", "off"), ("on", "on"), ("off", "off")])
def test_a_run_file_may_switch_sharing_on_and_off_in_yamls_words(written: str, meant: str) -> None:
    config = load_run_file(ROOT / "configs/digits.yaml", [f"data.share_prefix={written}", "train.strategy=fsdp"])
    assert config.data.share_prefix == meant and config.to_dict()["data"]["share_prefix"] == meant


def test_a_cap_without_shared_prefixes_is_a_warning() -> None:
    fields = [problem.field for problem in warnings(small(data__max_questions_per_image=4))]
    assert "data.max_questions_per_image" in fields
    shared: list[Problem] = warnings(small(data__max_questions_per_image=4, data__share_prefix="on"))
    assert "data.max_questions_per_image" not in {problem.field for problem in shared}
