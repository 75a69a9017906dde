"""A host that is a step ahead of what it has read, as it is on a GPU, trains and says the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.short_form import chosen
from tests.support.trainer.runs import make_run, metrics, run_ranks, summary, train_runs
from vlmpipe.trainer.config.job import JobConfig

STOPPED_AT = 4
OF_CLOCKS = ("_s", "per_s", "peak_memory_gib", "straggler_spread", "slowest_rank", "record_crc32c")
SETTINGS = {
    "features.cache": "off",
    "train.global_batch_size": 4,
    "train.epochs": 5,
    "train.max_steps": 9,
    "train.log_every_steps": 3,
    "train.checkpoint_every_steps": 100,
    "train.validate_every_steps": 5,
}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, JobConfig]:
    """By how they were trained, all in two processes."""
    root: Path = tmp_path_factory.mktemp("unread")
    late: dict[str, list[str]] = chosen(
        {"behind": [], "stopped": ["--stop-at", str(STOPPED_AT)]}, lambda name: name == "stopped"
    )
    found = {name: make_run(root, name, SETTINGS, features="off") for name in ("at once", *late)}
    train_runs([found["at once"]], processes=2)
    for name, more in late.items():
        arguments = ["--configs", f"{found[name].run.run_uri}/run.json", *more]
        run_ranks("tests.support.drivers.train_behind", arguments, processes=2)
    return found


def lines(job: JobConfig) -> list[dict[str, Any]]:
    """The run's metrics without what clocks and allocators say."""
    return [{name: value for name, value in line.items() if not name.endswith(OF_CLOCKS)} for line in metrics(job)]


@pytest.mark.slow
def test_asynchronous_metrics_equal_synchronous_ones(jobs: dict[str, JobConfig]) -> None:
    assert [line["step"] for line in lines(jobs["behind"])] == [1, 3, 5, 6, 9]
    assert lines(jobs["behind"]) == lines(jobs["at once"])
    counted = ("tokens", "label_tokens", "first_loss", "final_loss", "steps")
    behind, at_once = summary(jobs["behind"]), summary(jobs["at once"])
    assert [behind[name] for name in counted] == [at_once[name] for name in counted]


def test_a_stop_is_seen_a_step_later_and_nothing_is_lost(jobs: dict[str, JobConfig]) -> None:
    assert summary(jobs["stopped"])["resumed_from_step"] == STOPPED_AT + 1
    by_step = {line["step"]: line["loss"] for line in lines(jobs["stopped"])}
    expected = {line["step"]: line["loss"] for line in lines(jobs["at once"])}
    assert {step: by_step[step] for step in expected} == expected
