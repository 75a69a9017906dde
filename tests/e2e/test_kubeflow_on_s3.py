"""The whole graph as it is compiled for Kubeflow, with its files on a real S3 server.

Steps run through kfp.local, and their jobs as TrainJobs of a strict fake of the Kubernetes API, whose nodes get their
account from the cluster's secret.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.kubernetes.api import FakeKubernetes
from tests.support.paths import ROOT
from tests.support.s3 import s3_server
from tests.support.short_form import only_whole
from trainer.storage import open_storage

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(400), only_whole]


def test_a_run_goes_from_data_to_a_registered_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with s3_server(tmp_path / "s3") as server, FakeKubernetes() as cluster:
        cluster.secrets = {"minio": {"accesskey": server.access_key, "secretkey": server.secret_key}}
        monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig(tmp_path)))
        monkeypatch.setenv("VLMPIPE_CACHE_DIR", str(tmp_path))
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        overrides = [
            "output.root_uri=s3://bucket/root",
            "register.registry=s3://bucket/registry",
            f"kubeflow.s3_endpoint={server.endpoint}",
            "kubeflow.secret_env={AWS_ACCESS_KEY_ID: minio/accesskey, AWS_SECRET_ACCESS_KEY: minio/secretkey}",
            "cluster.image_uri=registry.example.com/vlmpipe/trainer:1",
            "gcp.pipeline_image=registry.example.com/vlmpipe/pipeline:1",
            "train.max_steps=40",
            "gate.min_exact_match=0",
            "gate.min_margin_over_chance=null",
            "gate.min_margin_over_shuffled_image=null",
        ]
        program = [sys.executable, "-m", "tests.support.pipelines.kubeflow_graph", "configs/digits.yaml", "r1"]
        done = subprocess.run([*program, *overrides], cwd=ROOT, env=os.environ, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        assert [name.rpartition("-")[0] for name in cluster.jobs] == [
            "digits-cache-features",
            "digits-train",
            "digits-evaluate",
        ]
        run, registry = open_storage("s3://bucket/root/runs/r1"), open_storage("s3://bucket/registry")
        names = [info.name for info in run.list()]
        assert {"report.html", "evaluate.json", "export/model.safetensors"} <= set(names)
        assert any(name.startswith("logs/events.out.tfevents") for name in names)
        registered = json.loads(run.read("registered.json"))
        assert registered["model"] == "digits" and registered["uri"].startswith("s3://bucket/registry/")
        assert [info.name for info in registry.list()]
