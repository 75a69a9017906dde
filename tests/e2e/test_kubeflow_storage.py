"""The whole graph as it is compiled for Kubeflow, with its files on a real S3 server, and in a volume's folder.

Steps run through kfp.local, and their jobs as TrainJobs of a strict fake of the Kubernetes API, whose nodes get their
account from the cluster's secret. The volume is not mounted: its folder is there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.fakes.kubernetes.api import FakeKubernetes
from tests.support.paths import ROOT
from tests.support.s3 import s3_server
from vlmpipe.cli.runs.curve import _curve_of
from vlmpipe.config.yaml_loader import read_run_file
from vlmpipe.records.learning_curve import LearningCurve
from vlmpipe.trainer.records.evaluation import Evaluation
from vlmpipe.trainer.records.replay import ReplayAnswers, ReplayPointer
from vlmpipe.trainer.storage import open_storage

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400), pytest.mark.slow]
SMALL = (
    "cluster.image_uri=registry.example.com/vlmpipe/trainer:1",
    "gcp.pipeline_image=registry.example.com/vlmpipe/pipeline:1",
    "train.max_steps=40",
    "gate=none",
)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeKubernetes]:
    with FakeKubernetes() as cluster:
        monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig(tmp_path)))
        monkeypatch.setenv("VLMPIPE_CACHE_DIR", str(tmp_path))
        yield cluster


def test_a_run_on_s3_goes_from_data_to_a_registered_model(
    cluster: FakeKubernetes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with s3_server(tmp_path / "s3") as server:
        cluster.secrets = {"minio": {"accesskey": server.access_key, "secretkey": server.secret_key}}
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        storage = (
            f"kubeflow.s3_endpoint={server.endpoint}",
            "kubeflow.secret_env={AWS_ACCESS_KEY_ID: minio/accesskey, AWS_SECRET_ACCESS_KEY: minio/secretkey}",
        )
        goes_to_its_end(cluster, "s3://bucket", *storage)


def test_a_run_on_a_volume_goes_from_data_to_a_registered_model(cluster: FakeKubernetes, tmp_path: Path) -> None:
    mount = tmp_path / "mnt"
    mount.mkdir()
    goes_to_its_end(cluster, str(mount), f"kubeflow.volumes=[{{claim: team-data, mount_path: {mount}}}]")
    for job in cluster.jobs.values():
        assert f'"mountPath": "{mount}"' in json.dumps(job)


def goes_to_its_end(cluster: FakeKubernetes, place: str, *storage: str) -> None:
    """Run the graph with everything under `place`, and assert what it leaves there."""
    overrides = [f"output.root_uri={place}/output", f"register.registry={place}/registry", *storage, *SMALL]
    run_graph("configs/digits.yaml", "r1", overrides)
    jobs = [name.rpartition("-")[0] for name in cluster.jobs]
    assert jobs == ["digits-cache-features", "digits-train", "digits-evaluate"]
    run, registry = open_storage(f"{place}/output/runs/r1"), open_storage(f"{place}/registry")
    names = [info.name for info in run.list()]
    assert {"report.html", "evaluate.json", "export/model.safetensors"} <= set(names)
    assert any(name.startswith("logs/events.out.tfevents") for name in names)
    registered = json.loads(run.read("registered.json"))
    assert registered["model"] == "digits" and registered["uri"].startswith(f"{place}/registry/")
    assert [info.name for info in registry.list()]


def run_graph(run_file: str, run_id: str, overrides: Sequence[str]) -> None:
    """Run the compiled graph to its end, with its steps as processes."""
    program = [sys.executable, "-m", "tests.support.pipelines.kubeflow_graph", run_file, run_id, *overrides]
    done = subprocess.run(program, cwd=ROOT, env=os.environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.timeout(1800)  # three trainings, in two jobs
def test_a_learning_curve_on_a_volume_goes_to_its_record(cluster: FakeKubernetes, tmp_path: Path) -> None:
    mount = tmp_path / "mnt"
    mount.mkdir()
    overrides = [
        f"output.root_uri={mount}/output",
        f"kubeflow.volumes=[{{claim: team-data, mount_path: {mount}}}]",
        *SMALL,
        "cluster.replica_count=1",
        "data.max_samples=200",
        "evaluate.max_samples=20",
    ]
    path = ROOT / "configs/digits.yaml"
    there = _curve_of(path, overrides, [0.2, 0.5, 1.0], 1, 0.9, "exact_match", is_here=False)
    run_graph(str(path), "r1", there.source[1:])
    jobs = sorted(name.rpartition("-")[0] for name in cluster.jobs)
    assert jobs[0].startswith("digits-curve-cache-features") and len(jobs) == 3, "one encoding, two jobs of trainings"
    run = open_storage(f"{mount}/output/runs/r1")
    curve = LearningCurve.read(run)
    assert [point.share for point in curve.points] == [0.2, 0.5, 1.0] and all(point.score for point in curve.points)
    assert 'id="curve"' in run.read("report.html").decode(), "after the last step, too"


@pytest.mark.timeout(1800)  # two trainings, and a job that answers
def test_replay_on_a_volume_mixes_the_answers_of_the_start_model_once(cluster: FakeKubernetes, tmp_path: Path) -> None:
    mount = tmp_path / "mnt"
    mount.mkdir()
    here = [
        f"output.root_uri={mount}/output",
        f"kubeflow.volumes=[{{claim: team-data, mount_path: {mount}}}]",
        *SMALL,
        "cluster.replica_count=1",
        "cluster.processes_per_replica=1",
        "evaluate.max_samples=20",
    ]
    run_graph("configs/digits.yaml", "r1", [*here, "data.max_samples=200"])
    content = read_run_file(ROOT / "configs/digits.yaml")
    del content["model"]["tower"], content["model"]["language_model"]
    content["model"] |= {"pretrained": {"weights": "run:r1"}, "tokenizer": "run:r1"}
    new = {"name": "digits", "uri": "builtin:digits", "max_samples": 200}
    content["data"] = {"sources": [new, {"name": "before", "replay": "self"}], "sequence_length": 256}
    after = tmp_path / "after.yaml"
    after.write_text(json.dumps(content), encoding="utf-8")  # which is YAML, too
    for run_id, jobs in (("r2", ["replay", "cache-features", "train", "evaluate"]), ("r3", ["train", "evaluate"])):
        before = len(cluster.jobs)
        run_graph(str(after), run_id, here)
        named = [name.rpartition("-")[0] for name in list(cluster.jobs)[before:]]
        assert named == [f"digits-{job}" for job in jobs], "the second run finds answers and features of the first"
        run = open_storage(f"{mount}/output/runs/{run_id}")
        answers = ReplayAnswers.read(open_storage(ReplayPointer.read(run).folder))
        assert answers.answered > 0 and answers.answer_tokens > 0
        trained = Evaluation.read(run)
        assert trained.start is not None and trained.start.after is not None
