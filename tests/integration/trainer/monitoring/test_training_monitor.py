"""A run whose second node has a faulty GPU and slow forward passes: what its metrics and its record say."""

from __future__ import annotations

import pytest

from tests.support.trainer.runs import make_run, metrics, run_ranks
from trainer.config.job import JobConfig
from trainer.storage import open_storage
from trainer.storage.records import read_record

STEPS = 8


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[JobConfig, str]:
    """And what rank 0 printed."""
    changes = {"train.epochs": 5, "train.max_steps": STEPS, "train.log_every_steps": 1}
    job = make_run(tmp_path_factory.mktemp("watched"), "watched", changes, features="off")
    arguments = ["--configs", f"{job.run.run_uri}/run.json"]
    return job, run_ranks("tests.support.drivers.train_watched", arguments, processes=1, nodes=2)


def test_each_line_has_the_gauges_of_all_ranks(run: tuple[JobConfig, str]) -> None:
    lines = metrics(run[0])
    assert [line["gpus_throttled"] for line in lines] == [0, 1] * (STEPS // 2)
    assert [line["gpu_utilization_min"] for line in lines] == [90, 50] * (STEPS // 2)
    assert {line["slowest_rank"] for line in lines} == {1}
    assert run[1].count("gauges: closed") == 1


def test_faults_and_stragglers_are_noted_once_with_their_node(run: tuple[JobConfig, str]) -> None:
    job, printed = run
    notes = read_record(open_storage(job.run.run_uri), "steps/train.json")["detail"]["notes"]
    gpu, slow = (note for note in notes if note.startswith("warning: "))
    assert gpu == (
        "warning: the GPU of rank 1 (node 1) is throttled (hardware thermal slowdown) "
        "and has 2 uncorrected memory errors (ECC)"
    )
    assert slow.startswith("warning: rank 1 (node 1) is a straggler: its forward passes take 2.00 times the mean")
    assert [printed.count(f"train: {note}") for note in (gpu, slow)] == [1, 1]
