"""A training that stops early and exports its best step decides the same however it is killed, and on all ranks.

The values go up and down, so that the best step is neither the last one nor one that is saved anyway. By default
`tests/unit/trainer/test_loop.py` kills the loop everywhere, without processes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.trainer.runs import ends_of_ranks, make_run, metrics, summary, train_runs
from vlmpipe.trainer.checkpoint.attempts import step_of
from vlmpipe.trainer.checkpoint.commit import committed
from vlmpipe.trainer.checkpoint.fault_points import VARIABLE
from vlmpipe.trainer.checkpoint.sync import sync_run
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.storage import open_storage

EVERY, SAVED_EVERY, PATIENCE, BEST, LAST = 2, 8, 2, 14, 18
RUN: dict[str, Any] = {
    "train.max_steps": 40, "train.epochs": 40, "train.optimizer.learning_rate": 0.05, "train.keep_checkpoints": 1,
    "train.validate_every_steps": EVERY, "train.validation_sequences": 5, "train.checkpoint_every_steps": SAVED_EVERY,
    "train.early_stopping": {"patience": PATIENCE}, "checkpoint.export": "best",
    "features.cache": "off", "data.pack": False, "data.validation_fraction": 0.2,
}  # fmt: skip
LAYOUTS = {"ddp on one": ("ddp", 1), "ddp on two": ("ddp", 2), "fsdp on two": ("fsdp", 2), "zero2 on two": ("zero2", 2)}
# Each validation ends once in SIGKILL of both ranks: among them that of the best step, and that which ends training.
KILLED = {f"{strategy}, {nth}": (strategy, nth) for strategy in ("ddp", "fsdp") for nth in range(1, LAST // EVERY + 1)}


def values(job: JobConfig) -> dict[int, float]:
    return {line["step"]: line["validation_loss"] for line in metrics(job) if "validation_loss" in line}


def require_ended(job: JobConfig) -> None:
    """The run has stopped at its step, for its reason, and has the checkpoint of its best step, which is exported."""
    written, store = summary(job), open_storage(job.run.run_uri)
    assert list(values(job)) == list(range(EVERY, LAST + 1, EVERY))
    assert min(values(job), key=lambda step: values(job)[step]) == BEST == LAST - EVERY * PATIENCE
    assert (written["steps"], written["total_steps"], written["best_step"]) == (LAST, 40, BEST)
    assert written["best_value"] == values(job)[BEST] and step_of(written["best_checkpoint"]) == BEST
    assert written["ended_early"].startswith(f"validation loss is not better in {PATIENCE} validations since step 14")
    assert [step_of(name) for name in committed(store)] == [BEST, LAST], "neither is a multiple of the interval"
    described = sync_run(job)
    assert described["step"] == BEST and described["checkpoint"] == written["best_checkpoint"]


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "nth"), KILLED.values(), ids=KILLED)
def test_a_killed_run_ends_where_it_would_have(strategy: str, nth: int, tmp_path: Path) -> None:
    job = make_run(tmp_path, "killed", RUN | {"train.strategy": strategy}, features="off")
    config = ["--config", f"{job.run.run_uri}/run.json", "--nth", str(nth), "--ends-by", "kill"]
    codes, texts = ends_of_ranks("tests.support.drivers.train_failing_validation", config, processes=2)
    assert all(codes), texts
    train_runs([job], processes=2)
    require_ended(job)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> dict[str, JobConfig]:
    root, jobs = tmp_path_factory.mktemp("straight"), {}
    for name, (strategy, processes) in LAYOUTS.items():
        jobs[name] = make_run(root, name.replace(" ", "-"), RUN | {"train.strategy": strategy}, features="off")
        train_runs([jobs[name]], processes=processes)
    return jobs


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_decides_the_same(name: str, straight: dict[str, JobConfig]) -> None:
    require_ended(straight[name])
    assert values(straight[name]) == pytest.approx(values(straight["ddp on one"]), rel=5e-3)  # the high rate adds up


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("point", ["before COMMIT", "after COMMIT"])
def test_a_run_killed_while_it_saves_has_the_values_of_one_that_was_not(
    strategy: str, point: str, straight: dict[str, JobConfig], tmp_path: Path
) -> None:
    """Killed in its first save, of its first validated step; then in the first save of each start, until it ends."""
    job = make_run(tmp_path, "killed", RUN | {"train.strategy": strategy}, features="off")
    config, starts = ["--config", f"{job.run.run_uri}/run.json"], 0
    while starts < 3:
        codes, _ = ends_of_ranks("vlmpipe.trainer.train", config, processes=2, **{VARIABLE: point})
        starts += 1
        assert any(codes)
    train_runs([job], processes=2)
    require_ended(job)
    assert values(job) == values(straight[f"{strategy} on two"])


@pytest.mark.slow
def test_a_run_that_ended_early_makes_no_step_again(straight: dict[str, JobConfig]) -> None:
    job = straight["ddp on two"]
    before = metrics(job)
    train_runs([job], processes=2)
    assert metrics(job) == before and summary(job)["ended_early"]
    require_ended(job)
