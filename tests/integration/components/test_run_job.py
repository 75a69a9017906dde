"""A job of a run as a step of somebody's own pipeline: on Vertex AI, on this machine, and in the example's graph."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from google.api_core.retry import Retry

from tests.fakes.gcs.server import FakeGcs
from tests.fakes.vertex.server import FakeVertex
from tests.support.paths import ROOT
from tests.support.trainer.tiny_runs import TINY
from vlmpipe.components.jobs.run_job import run_job
from vlmpipe.config.run_config import RunConfig, load_run_file
from vlmpipe.google_cloud import retries
from vlmpipe.google_cloud.client import ENDPOINT_VARIABLE
from vlmpipe.job_spec.build import worker_pools
from vlmpipe.platforms.vertex.jobs import capacity_fallback
from vlmpipe.rehearsal.vertex.custom_jobs import Step
from vlmpipe.trainer.config.job import RunPaths
from vlmpipe.trainer.errors import ExitCode
from vlmpipe.trainer.storage import open_storage

SPOT_FILE = ROOT / "tests/fixtures/run_files/llava-7b-zero2-spot.yaml"
EXAMPLE = ROOT / "examples/own_pipeline/pipeline.py"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeVertex]:
    for name in ("RETRY", "PATIENT"):
        monkeypatch.setattr(retries, name, Retry(initial=0.01, maximum=0.05, timeout=5.0))
    with FakeVertex() as running:
        monkeypatch.setenv(ENDPOINT_VARIABLE, running.endpoint)
        monkeypatch.setattr(capacity_fallback, "POLL_S", 0.01)
        yield running


PLACE = RunPaths(run_id="mine", root_uri="gs://team")


@pytest.fixture
def config() -> RunConfig:
    return load_run_file(SPOT_FILE, ["gcp.project=test-project", "gcp.location=us-central1"])


@pytest.fixture
def run(tmp_path: Path, config: RunConfig) -> Path:
    (tmp_path / "run.json").write_text(json.dumps(config.to_run_json(PLACE)))
    return tmp_path


@pytest.fixture
def in_bucket(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The same run where Vertex AI can write."""
    with FakeGcs(buckets=["team"]) as gcs:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs.endpoint)
        open_storage("gs://team/runs/mine").write("run.json", json.dumps(config.to_run_json(PLACE)).encode())
        yield "gs://team/runs/mine"


def test_a_job_on_vertex_ai_is_the_one_that_the_run_file_names(
    server: FakeVertex, in_bucket: str, config: RunConfig
) -> None:
    server.custom_jobs.scripts = [[Step("RUNNING"), Step("SUCCEEDED")]]
    folder, resources = run_job(in_bucket, "train", "vertex")
    (job,) = server.custom_jobs.jobs.values()
    wanted = worker_pools(config, "train", in_bucket)
    pools = job.job_spec.worker_pool_specs
    assert [(pool.machine_spec.machine_type, pool.replica_count) for pool in pools] == [
        (pool["machine_spec"]["machine_type"], pool["replica_count"]) for pool in wanted
    ]
    assert job.job_spec.scheduling.strategy.name == "SPOT" and job.labels["vlmpipe-step"] == "train"
    assert folder == in_bucket and job.name in resources


def test_a_job_that_fails_ends_the_step(server: FakeVertex, in_bucket: str) -> None:
    server.custom_jobs.scripts = [[Step("RUNNING"), Step("FAILED", 3, "The replica workerpool0-0 exited with 65.")]]
    with pytest.raises(SystemExit) as ended:
        run_job(in_bucket, "train", "vertex")
    assert len(server.custom_jobs.jobs) == 1 and ended.value.code not in (0, None, ExitCode.CONFIG)


@pytest.mark.parametrize(
    ("job", "target", "said"),
    [
        ("training", "vertex", "expected: a job of replay, cache_features, train, evaluate, benchmark"),
        ("train", "vertx", "on vertex, kubeflow, local"),
        ("benchmark", "vertex", "error: job benchmark, which this run does not have"),
        ("train", "kubeflow", "kubeflow"),
    ],
)
def test_what_the_run_does_not_have_is_refused(
    run: Path, capsys: pytest.CaptureFixture[str], job: str, target: str, said: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        run_job(str(run), job, target)
    assert ended.value.code == ExitCode.CONFIG and said in " ".join(capsys.readouterr().err.split())


def test_nothing_is_encoded_where_nothing_is_missing(run: Path) -> None:
    pointers = {"prepared_uri": str(run), "features_uri": str(run), "features": "off"}
    (run / "prepared.json").write_text(json.dumps(pointers))
    assert run_job(str(run), "cache_features", "vertex") == (str(run), "{}")
    record = json.loads((run / "steps/cache-features.json").read_text())
    assert record["message"] == "no cache: images are encoded while training"


def test_the_example_compiles_for_both_services(tmp_path: Path) -> None:
    environment = {**os.environ, "VLMPIPE_PIPELINE_IMAGE": "example.com/vlmpipe/pipeline:1"}
    subprocess.run([sys.executable, str(EXAMPLE)], cwd=tmp_path, env=environment, check=True, capture_output=True)
    spec = next(yaml.safe_load_all((tmp_path / "own-pipeline.yaml").read_text()))
    tasks = spec["root"]["dag"]["tasks"]
    assert set(tasks) == {
        "choose-rate",
        "open-run",
        "prepare-data",
        "run-job",
        "run-job-2",
        "sync-checkpoint",
        "publish",
    }
    assert set(tasks["run-job"]["dependentTasks"]) == {"open-run", "prepare-data"}
    component = spec["components"]["comp-run-job"]
    assert component["inputDefinitions"]["parameters"].keys() == {"run_uri", "job", "target"}
    assert component["outputDefinitions"]["parameters"].keys() == {"run_uri", "gcp_resources"}
    images = {one["container"]["image"] for one in spec["deploymentSpec"]["executors"].values()}
    assert images == {"example.com/vlmpipe/pipeline:1", "python:3.12-slim"}
    assert len(EXAMPLE.read_text().partition('"""\n\n')[2].splitlines()) <= 40


LOCALLY = """
import runpy, sys
from kfp import local
local.init(local.SubprocessRunner(use_venv=False))
pipeline = runpy.run_path(sys.argv[1])["own_pipeline"]
task = pipeline(run_file=open("run.json").read(), root_uri=sys.argv[2], run_id="mine", samples=100, target="local")
print("said:", task.output)
"""


@pytest.mark.slow
def test_the_example_trains_on_this_machine(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps(TINY))
    (tmp_path / "locally.py").write_text(LOCALLY)
    arguments = [sys.executable, "locally.py", str(EXAMPLE), str(tmp_path / "root")]
    answer = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, timeout=1800)
    assert answer.returncode == 0, answer.stdout[-3000:] + answer.stderr[-3000:]
    run = tmp_path / "root/runs/mine"
    assert f"said: mine is in {run}/export" in answer.stdout
    assert (run / "export/model.safetensors").is_file()
    assert json.loads((run / "run.json").read_text())["train"]["optimizer"]["learning_rate"] == 2e-3
