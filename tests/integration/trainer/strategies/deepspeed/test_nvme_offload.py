"""Optimizer state on a disk (train.nvme_path) is that in memory, to the bit: losses, checkpoints, resuming."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.short_form import chosen, only_whole
from tests.support.trainer.runs import encode_features, losses, make_run, run_ranks, summary
from vlmpipe.trainer.config.job import JobConfig

RANKS, STOP_STEP = 2, 2
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

CASES: dict[str, dict[str, Any]] = chosen(
    {
        "zero1": {"train.strategy": "zero1", "train.offload": "optimizer"},
        "zero2": {"train.strategy": "zero2", "train.offload": "optimizer", "train.ema_decay": 0.9},
        "zero3": {"train.strategy": "zero3", "train.offload": "optimizer"},
        "zero3 weights too": {
            "train.strategy": "zero3",
            "train.offload": "optimizer+weights",
            "train.precision": "bf16",
            "train.ema_decay": 0.9,
        },
        "zero3 many groups": {
            "train.strategy": "zero3",
            "train.offload": "optimizer",
            "train.deepspeed": {"zero_optimization": {"sub_group_size": 5000}},
        },
        "zero2 fp16": {"train.strategy": "zero2", "train.offload": "optimizer", "train.precision": "fp16"},
    },
    lambda name: name == "zero3 weights too",
)

# Where a stopped run was, and where it goes on.
WAYS = chosen(
    {"on": ("disk", "disk"), "back": ("disk", "memory"), "to disk": ("memory", "disk")}, lambda name: name != "to disk"
)


def train(jobs: list[JobConfig]) -> None:
    arguments = ["--configs", *[f"{job.run.run_uri}/run.json" for job in jobs]]
    run_ranks("tests.support.drivers.train_on_disk", arguments, processes=RANKS, timeout_s=400)


class Runs:
    """Of each case: in memory, on a disk, and two that are stopped and go on: on the disk, and back in memory."""

    def __init__(self, root: Path) -> None:
        self.root, self.disk = root, root / "disk"
        encode_features(make_run(root, "features"))
        encode_features(make_run(root, "features-bf16", {"train.precision": "bf16"}))  # in which its tower computes
        stop = {"train.max_steps": STOP_STEP}
        self.memory = {name: make_run(root, f"{name} memory", case) for name, case in CASES.items()}
        self.on_disk = {name: make_run(root, f"{name} disk", self.placed(case, "disk")) for name, case in CASES.items()}
        stopped = [
            make_run(root, f"{name} {way}", self.placed(case, begins) | stop)
            for way, (begins, _) in WAYS.items()
            for name, case in CASES.items()
        ]
        train([*self.memory.values(), *self.on_disk.values(), *stopped])
        self.resumed = {
            way: {name: make_run(root, f"{name} {way}", self.placed(case, ends)) for name, case in CASES.items()}
            for way, (_, ends) in WAYS.items()
        }
        train([job for jobs in self.resumed.values() for job in jobs.values()])

    def placed(self, case: dict[str, Any], place: str) -> dict[str, Any]:
        return case | ({"train.nvme_path": str(self.disk)} if place == "disk" else {})


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("disk"))


@only_whole
@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_in_memory(case: str, runs: Runs) -> None:
    found = losses(runs.on_disk[case])
    assert found == losses(runs.memory[case])
    assert len(set(found)) > STOP_STEP + 2, "training must have changed the weights"


@only_whole
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_a_run_goes_on_exactly_with_and_without_a_disk(case: str, way: str, runs: Runs) -> None:
    resumed = runs.resumed[way][case]
    assert summary(resumed)["resumed_from_step"] == STOP_STEP
    assert losses(resumed) == losses(runs.memory[case])


@only_whole
@pytest.mark.parametrize("case", CASES)
def test_all_state_lies_on_the_disk_and_else_none(case: str, runs: Runs) -> None:
    kinds = {"weights", "exp_avg", "exp_avg_sq"} | ({"averages"} if "train.ema_decay" in CASES[case] else set())
    for rank in range(RANKS):
        in_memory = places(runs.memory[case], rank)
        assert in_memory.keys() == kinds
        ended_there = [runs.resumed[way][case] for way, (_, ends) in WAYS.items() if ends == "disk"]
        for job in (runs.on_disk[case], *ended_there):
            found = places(job, rank)
            assert found == {kind: {"on disk": sizes["in memory"], "in memory": 0} for kind, sizes in in_memory.items()}
        assert places(runs.resumed["back"][case], rank) == in_memory
        assert all(sizes["on disk"] == 0 and sizes["in memory"] > 0 for sizes in in_memory.values())


@only_whole
def test_nothing_is_left_in_the_folder(runs: Runs) -> None:
    assert runs.disk.is_dir() and not list(runs.disk.iterdir())


def places(job: JobConfig, rank: int) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = json.loads(
        Path(job.run.run_uri, f"places-{rank}.json").read_text(encoding="utf-8")
    )
    return found
