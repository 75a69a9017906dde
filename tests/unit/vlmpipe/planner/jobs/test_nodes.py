"""A local run's plan: all its launchers share this machine, and nothing of another is in it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tests.support.paths import ROOT
from vlmpipe.catalog.machines import Device, load_catalog
from vlmpipe.catalog.this_machine import LocalMachine
from vlmpipe.config.run_config import load_run_file
from vlmpipe.planner.plan import Plan, plan_run

GIB = 2**30
DIGITS = ROOT / "configs/digits.yaml"
L4, RTX_4090 = load_catalog().gpus["NVIDIA_L4"], Device("NVIDIA GeForce RTX 4090", 23.99, 8.9)
ONE_RANK = ["cluster.replica_count=1", "cluster.processes_per_replica=1", "plan.samples=1000", "plan.sample_tokens=60"]


def here(*gpus: Device, free_gib: float = 60) -> LocalMachine:
    return LocalMachine(16, 64 * GIB, int(free_gib * GIB), gpus)


def plan(path: Path, machine: LocalMachine, overrides: Sequence[str] = ()) -> Plan:
    return plan_run(load_run_file(path, overrides), here=machine)


def test_launchers_share_the_memory_that_is_free() -> None:
    found = plan(DIGITS, here(free_gib=10))  # two launchers of a process each
    assert found.memory and found.memory.capacity_bytes == 5 * GIB and found.state == "green"
    assert {job.job: job.host.capacity_bytes for job in found.beside_training if job.host} == {
        "cache_features": 10 * GIB,
        "evaluate": 10 * GIB,
    }
    assert plan(DIGITS, here(free_gib=2)).state == "red"
    assert plan(DIGITS, here(free_gib=2)).errors[0].startswith("does not fit: 1.0 GiB on process on this machine")
    text = json.dumps(found.as_dict())
    assert "n1-standard-8" not in text and "pd-ssd" not in text and found.cost is None and found.pipeline is None


def test_a_gpu_of_the_catalogue_has_a_time_and_another_one_its_memory_only() -> None:
    known, unknown = plan(DIGITS, here(L4), ONE_RANK), plan(DIGITS, here(RTX_4090), ONE_RANK)
    assert known.memory and known.memory.device == "NVIDIA_L4" and known.time and known.time.train_hours
    assert unknown.memory and unknown.memory.device == RTX_4090.device and unknown.memory.fits
    assert unknown.memory.total_bytes == known.memory.total_bytes
    assert unknown.time and unknown.time.step_s is None and "catalogue does not have" in unknown.time.assumptions[0]
    small = plan(DIGITS, here(Device("NVIDIA GeForce RTX 3060", 0.5, 8.6)), ONE_RANK)
    assert small.state == "red" and small.memory
    assert not any(key.startswith("cluster.") for setting in small.memory.nearest for key in setting.change)


def test_more_processes_than_gpus_are_refused_as_the_run_does() -> None:
    (error,) = plan(DIGITS, here(L4)).unsupported
    assert error.startswith("2 processes are to train on this machine, which has 1 GPU: start fewer")
    fixed = plan(DIGITS, here(L4), ONE_RANK)
    assert "cluster.replica_count=1 cluster.processes_per_replica=1" in error and not fixed.unsupported
    assert not plan(DIGITS, here()).unsupported  # on the CPU
