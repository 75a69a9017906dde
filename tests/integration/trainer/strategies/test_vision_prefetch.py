"""A tower that runs for the next micro-batch gives the losses of one that runs in its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.short_form import chosen, only_whole
from tests.support.trainer.runs import losses, make_run, train_runs
from tests.support.trainer.tiny_runs import strategy_changes

STEPS = 3
ALL: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp": {},
    "zero2": {},
    "ddp bf16": {"train.precision": "bf16"},
    "zero1 bf16": {"train.precision": "bf16"},
    "fsdp bf16": {"train.precision": "bf16"},
    "hsdp": {},
}
CASES = chosen(ALL, lambda name: name == "fsdp")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], list[float]]:
    """Losses by case, and whether the tower ran ahead."""
    root: Path = tmp_path_factory.mktemp("tower-stream")
    jobs = {}
    for name, changes in CASES.items():
        strategy = name.split()[0]
        for ahead in (False, True):
            settings = {
                **strategy_changes(strategy),
                "features.cache": "off",
                "train.max_steps": STEPS,
                "train.micro_batch_size": 1,
                "train.log_every_steps": 1,
                "train.overlap_vision_encoder": ahead,
                **changes,
            }
            jobs[name, ahead] = make_run(root, f"{name}-{ahead}".replace(" ", "-").lower(), settings, features="off")
    train_runs(list(jobs.values()), processes=2)
    return {key: losses(job) for key, job in jobs.items()}


@only_whole
@pytest.mark.parametrize("name", CASES)
def test_losses_are_the_same_to_the_bit(name: str, found: dict[tuple[str, bool], list[float]]) -> None:
    assert len(found[name, True]) == STEPS
    assert found[name, True] == found[name, False]
