"""Profiling steps of a real run of two processes: what is in the files, and that it changes no loss."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.trainer.runs import losses, make_run, run_ranks, train_runs
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.monitoring.profiler import FOLDER
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.records import read_record

CHANGES = {
    "features.cache": "off",
    "train.max_steps": 5,
    "train.global_batch_size": 4,
    "train.checkpoint_every_steps": 3,
}
PROFILED = {"train.profile": {"start_step": 2, "steps": 3, "ranks": [1]}}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[JobConfig, JobConfig]:
    """Without and with a profile."""
    root = tmp_path_factory.mktemp("profiled")
    plain = make_run(root, "plain", CHANGES, features="off")
    profiled = make_run(root, "profiled", CHANGES | PROFILED, features="off")
    train_runs([plain, profiled], processes=2)
    return plain, profiled


def test_losses_are_the_same_to_the_bit(runs: tuple[JobConfig, JobConfig]) -> None:
    plain, profiled = runs
    assert losses(plain) == losses(profiled)
    assert not open_storage(plain.run.run_uri).list(FOLDER)


def test_the_summary_holds_phases_collectives_and_operations(runs: tuple[JobConfig, JobConfig]) -> None:
    store = open_storage(runs[1].run.run_uri)
    assert store.stat(f"{FOLDER}/rank-0.json") is None, "which is not among the ranks"
    found = read_record(store, f"{FOLDER}/rank-1.json")
    assert (found["first_step"], found["last_step"], found["rank"]) == (2, 4, 1)
    spans: dict[str, list[list[float]]] = found["spans"]
    assert {"forward and backward", "optimizer step", "checkpoint", "computing", "communication"} <= spans.keys()
    assert all(0 <= start <= end <= found["seconds"] + 1e-9 for line in spans.values() for start, end in line)
    assert len(spans["forward and backward"]) == 3, "one a step"
    assert any("all_reduce" in one["name"] and one["calls"] >= 3 for one in found["collectives"])
    names = [one["name"] for one in found["operations"]]
    assert any(name.startswith("aten::") for name in names) and not any("gloo" in name for name in names)
    seconds = [one["seconds"] for one in found["operations"]]
    assert seconds == sorted(seconds, reverse=True)


def test_the_trace_is_one_that_viewers_open(runs: tuple[JobConfig, JobConfig]) -> None:
    path = open_storage(runs[1].run.run_uri).fetch(f"{FOLDER}/rank-1.pt.trace.json.gz")
    events: list[dict[str, Any]] = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert sum(event.get("name") == "optimizer step" and event.get("ph") == "X" for event in events) == 3


def test_steps_behind_the_last_one_end_the_job_before_it_trains(tmp_path: Path) -> None:
    job = make_run(tmp_path, "behind", CHANGES | {"train.profile": {"start_step": 1000}}, features="off")
    with pytest.raises(AssertionError, match=r"train\.profile: steps 1000 to 1002 of a run of \d+"):
        run_ranks("tests.support.drivers.train_many", ["--configs", f"{job.run.run_uri}/run.json"], processes=1)
    assert open_storage(job.run.run_uri).stat("metrics.jsonl") is None
