"""Resumed equals uninterrupted, bit for bit, over four ranks: with two, a sum has no order that could differ."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.short_form import WHOLE, chosen
from tests.support.trainer.runs import encode_features, losses, make_run, summary, train_runs
from vlmpipe.trainer.config.job import JobConfig

RANKS = 4
STOP_STEP = 2
STEPS = {} if WHOLE else {"train.max_steps": STOP_STEP + 3}
STRATEGIES = chosen({name: name for name in ("ddp", "fsdp", "zero2", "zero3")}, lambda name: name == "ddp")
Pair = tuple[JobConfig, JobConfig]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    """Of each strategy an uninterrupted run, and one that was stopped and resumed."""
    root: Path = tmp_path_factory.mktemp("exact")
    encode_features(make_run(root, "features"))
    straight = {name: make_run(root, name, {"train.strategy": name, **STEPS}) for name in STRATEGIES}
    stopped = {"train.max_steps": STOP_STEP}
    first = [make_run(root, f"{name}-resumed", {"train.strategy": name, **stopped}) for name in STRATEGIES]
    train_runs([*straight.values(), *first], processes=RANKS)
    resumed = {name: make_run(root, f"{name}-resumed", {"train.strategy": name, **STEPS}) for name in STRATEGIES}
    train_runs([*resumed.values()], processes=RANKS)
    return {name: (straight[name], resumed[name]) for name in STRATEGIES}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_resumed_run_repeats_every_loss(strategy: str, pairs: dict[str, Pair]) -> None:
    straight, resumed = pairs[strategy]
    assert summary(resumed)["resumed_from_step"] == STOP_STEP
    assert len(losses(straight)) > STOP_STEP + 2, "a difference in the weights shows in a later loss"
    assert losses(resumed) == losses(straight)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_summary_counts_what_all_starts_took(strategy: str, pairs: dict[str, Pair]) -> None:
    """Of the last start alone, an interrupted run would look cheaper than it was."""
    straight, resumed = map(summary, pairs[strategy])
    for name in ("tokens", "label_tokens", "steps_made"):
        assert resumed[name] == straight[name] > 0
    assert (straight["starts"], resumed["starts"], resumed["steps_repeated"]) == (1, 2, 0)
    assert resumed["wall_s"] > 0
