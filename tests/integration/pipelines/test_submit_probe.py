"""`vlmpipe submit --only probe`: Google's client against the strict local server, and probes that really run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from google.cloud.aiplatform_v1 import types as api

from tests.fakes.gcs.server import FakeGcs
from tests.fakes.vertex.server import FakeVertex
from tests.support.vertex.real_jobs import run_jobs_for_real
from tests.support.vertex.submit_runs import CONFIG, MINE, Submit
from vlmpipe.planner.spending import probe as probe_planner
from vlmpipe.trainer.errors import ExitCode
from vlmpipe.trainer.storage import open_storage

pytest_plugins = ("tests.support.vertex.fixtures",)
RUN_URI = "gs://example-bucket/vlmpipe/runs/p1"
PROBE = ["submit", CONFIG, "--only", "probe", MINE, "--run-id", "p1"]
OTHER = "cluster.evaluate_machine={machine_type: g2-standard-8, accelerator_type: NVIDIA_L4, accelerator_count: 1}"
ON_CPUS = [
    "cluster.machine_type=n1-standard-8", "cluster.accelerator_type=", "cluster.accelerator_count=0",
    "cluster.reduction_server=null", "cluster.replica_count=1", "cluster.processes_per_replica=2",
    "train.strategy=ddp", "train.precision=fp32",
]  # fmt: skip


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few bytes for the bucket's rate."""
    monkeypatch.setattr(probe_planner, "BUCKET_MIB", 4)


def jobs_of(vertex: FakeVertex) -> list[api.CustomJob]:
    return list(vertex.custom_jobs.jobs.values())


def test_a_probe_is_one_replica_of_each_machine_for_three_minutes(
    vertex: FakeVertex, bucket: FakeGcs, vlmpipe: Submit
) -> None:
    answer = vlmpipe(*PROBE, OTHER, "--detach", "--json")
    assert answer.code == 0, answer.err
    train, evaluate = jobs_of(vertex)
    assert (train.labels["vlmpipe-step"], evaluate.labels["vlmpipe-step"]) == ("probe", "probe-2")
    for job in (train, evaluate):
        (pool,) = job.job_spec.worker_pool_specs
        assert pool.replica_count == 1 and job.job_spec.scheduling.timeout.total_seconds() == 180
        assert job.job_spec.scheduling.disable_retries and not job.job_spec.tensorboard
    assert evaluate.job_spec.worker_pool_specs[0].machine_spec.machine_type == "g2-standard-8"
    plan: dict[str, Any] = answer.json["plan"]
    assert plan["hours"] == pytest.approx(0.1) and 0 < plan["usd"] < 10
    assert [job["resource_name"] for job in answer.json["jobs"]] == [train.name, evaluate.name]


def test_a_dry_run_prints_the_plan_of_the_probe_and_sends_nothing(
    vertex: FakeVertex, bucket: FakeGcs, vlmpipe: Submit
) -> None:
    answer = vlmpipe(*PROBE, "--dry-run")
    assert answer.code == 0 and not jobs_of(vertex)
    first = answer.out.splitlines()[0]
    assert first.startswith("plan: 1 x a2-") and "3 minutes at most in all, at most $" in first


def test_a_probe_above_the_limit_is_asked_about(vertex: FakeVertex, bucket: FakeGcs, vlmpipe: Submit) -> None:
    answer = vlmpipe(*PROBE, "plan.confirm_above_usd=0", "--detach")
    assert answer.code == 64 and "the probe of llava-7b-zero2-spot is planned to cost $" in answer.err
    assert not jobs_of(vertex)


def test_a_machine_without_its_gpus_is_probed_to_the_end_and_says_what_would_fail(
    vertex: FakeVertex, bucket: FakeGcs, vlmpipe: Submit, tmp_path: Path, small: None
) -> None:
    run_jobs_for_real(vertex, tmp_path)
    one = ["cluster.machine_type=a2-ultragpu-2g", "cluster.accelerator_count=2", "cluster.reduction_server=null"]
    answer = vlmpipe(*PROBE, *one, "cluster.replica_count=1", "--plain")
    assert answer.code == ExitCode.MACHINE, (answer.err, next(tmp_path.glob("*.log")).read_text())
    said = answer.out
    assert "would fail: 2 x NVIDIA_A100_80GB (a2-ultragpu-2g) is paid for, and torch sees none" in said
    assert "GPUs that compute" in said and "run's folder, written, GB/s" in said
    rows = {line.split("  ")[1].strip(): line.split()[-2:] for line in said.splitlines() if line.startswith("  ")}
    assert float(rows["all-reduce in the machine, GB/s"][1]) > 0, "of its two ranks, on the CPU"
    assert rows["GPUs that compute"] == ["2", "0"] and float(rows["run's folder, read, GB/s"][1]) > 0


@pytest.mark.slow
def test_a_probe_on_cpus_measures_the_all_reduce_and_the_bucket(
    vertex: FakeVertex, bucket: FakeGcs, vlmpipe: Submit, tmp_path: Path, small: None
) -> None:
    run_jobs_for_real(vertex, tmp_path)
    answer = vlmpipe(*PROBE, *ON_CPUS, "--json")
    assert answer.code == 0, (answer.err, next(tmp_path.glob("*.log")).read_text())
    (result,) = answer.json["results"]
    measured = {row["what"]: row["measured"] for row in result["rows"]}
    assert float(measured["all-reduce in the machine, GB/s"]) > 0
    assert float(measured["run's folder, written, GB/s"]) > 0 and result["missing"] == []
    left = {info.name for info in open_storage(RUN_URI).list("probe")}
    assert left == {"probe/probe.plan.json", "probe/probe.json"}, "what was written for the rate is deleted"
