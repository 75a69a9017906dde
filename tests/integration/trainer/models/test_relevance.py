"""Training of relevance: equal on one and two processes by every strategy, cached and online, resumed and not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.trainer.equalities import begin_in_the_middle
from tests.support.trainer.native_runs import STEPS, STOP_STEP, base_of
from tests.support.trainer.runs import encode_features, losses, make_run, summary, train_runs
from tests.support.trainer.tiny_native import model_section
from vlmpipe.trainer.checkpoint.sync import sync_run
from vlmpipe.trainer.features.relevance.module import FILE, load_relevance
from vlmpipe.trainer.features.relevance.rules import STRATEGIES
from vlmpipe.trainer.storage import open_storage

FROZEN = ["tower", "projector", "language_model"]


def test_one_process_equals_two_cached_online_and_resumed(tmp_path: Path) -> None:
    model = model_section("qwen3_vl", freeze=FROZEN, relevance={"max_tokens": 4})
    changes: dict[str, Any] = base_of(tmp_path, "qwen3_vl") | {"model": model}
    one = make_run(tmp_path, "one", changes | {"train.checkpoint_every_steps": STOP_STEP}, features="off")
    cached = make_run(tmp_path, "cached", changes | {"features.cache": "on"})
    encode_features(cached)
    train_runs([one, cached], processes=1)
    resumed = make_run(tmp_path, "resumed", changes, features="off")
    begin_in_the_middle(resumed, one, STOP_STEP)
    train_runs([resumed], processes=1)
    two = make_run(tmp_path, "two", changes, features="off")
    train_runs([two], processes=2)
    assert len(losses(one)) == STEPS and len(set(losses(one))) == STEPS
    assert losses(cached) == losses(one)
    assert summary(resumed)["resumed_from_step"] == STOP_STEP
    assert losses(resumed)[-1] == losses(one)[-1], "what is drawn after a resume is what would have been drawn"
    assert losses(two) == pytest.approx(losses(one), rel=1e-5)
    described = sync_run(one)
    assert FILE in described["files"]
    module = load_relevance(Path(open_storage(one.run.run_uri).fetch(f"export/{FILE}")))
    assert module.config == one.model.relevance


# What learns beside the relevance module: nothing, adapters on the language model, or all but the tower.
STAGES: dict[str, dict[str, Any]] = {
    "relevance": {"freeze": FROZEN},
    "adapter": {"freeze": ["tower", "projector"], "lora": {"rank": 4}},
    "full": {"freeze": ["tower"]},
}
SHARDED = [name for name in STRATEGIES if name != "ddp"]


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_every_strategy_on_two_processes_equals_one(tmp_path: Path, stage: str) -> None:
    model = model_section("qwen3_vl", relevance={"max_tokens": 4}, **STAGES[stage])
    changes: dict[str, Any] = base_of(tmp_path, "qwen3_vl") | {"model": model}
    one = make_run(tmp_path, "one", changes, features="off")
    train_runs([one], processes=1)
    others = [make_run(tmp_path, name, changes | {"train.strategy": name}, features="off") for name in SHARDED]
    train_runs(others, processes=2)
    assert len(set(losses(one))) == STEPS
    for other in others:
        assert losses(other) == pytest.approx(losses(one), rel=1e-5), other.train.strategy
