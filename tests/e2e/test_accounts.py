"""A whole run on buckets in which each account may do what Terraform grants it, and no more."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.fakes.gcs.accounts import AccountsGcs, Roles
from tests.fakes.gcs.server import StoredObject
from tests.fakes.kubernetes.api import FakeKubernetes
from tests.support.paths import ROOT
from vlmpipe.access.grants import grants_json

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900), pytest.mark.slow]
HOSTS = {"pipeline": "127.0.0.1", "trainer": "localhost"}
COLOURS = {"red": (200, 0, 0), "green": (0, 200, 0), "blue": (0, 0, 200)}


def granted() -> dict[tuple[str, str], set[str]]:
    roles: dict[tuple[str, str], set[str]] = {}
    for grant in json.loads(grants_json())["buckets"].values():
        if grant["account"] in HOSTS:
            roles.setdefault((grant["account"], f"my-{grant['bucket']}"), set()).add(grant["role"])
    return roles


def run(tmp_path: Path, roles: Roles) -> tuple[subprocess.CompletedProcess[str], AccountsGcs]:
    """A run with everything in buckets: data, a benchmark, the mirror and the run's own files.

    Steps open the same files as the same accounts on Kubeflow and on Vertex AI, and only the first's graph can be run
    whole on this machine: its jobs are processes of a fake of the Kubernetes API.
    """
    with AccountsGcs(HOSTS, roles) as server, FakeKubernetes() as cluster:
        put(server)
        fields = [
            "output.root_uri=gs://my-runs/vlmpipe", "data.source=gs://my-data/records.json",
            "checkpoint.mirror_uri=gs://my-mirror/vlmpipe", "train.max_steps=4", "train.checkpoint_every_steps=2",
            "evaluate.benchmarks=[{name: pope, format: pope, uri: 'gs://my-data/pope.json', images: 'gs://my-data'}]",
            f"cluster.env={{STORAGE_EMULATOR_HOST: '{server.endpoint_of('trainer')}'}}",
            "gate=none",
            "cluster.image_uri=registry.example.com/vlmpipe/trainer:1",
            "gcp.pipeline_image=registry.example.com/vlmpipe/pipeline:1",
        ]  # fmt: skip
        environment = {
            **os.environ,
            "STORAGE_EMULATOR_HOST": server.endpoint_of("pipeline"),
            "VLMPIPE_CACHE_DIR": str(tmp_path),
            "KUBECONFIG": str(cluster.kubeconfig(tmp_path)),
        }
        program = [sys.executable, "-m", "tests.support.pipelines.kubeflow_graph", "configs/digits.yaml", "r1"]
        done = subprocess.run([*program, *fields], cwd=ROOT, env=environment, capture_output=True, text=True)
    return done, server


def put(server: AccountsGcs) -> None:
    records: list[dict[str, Any]] = []
    for index in range(96):
        colour = list(COLOURS)[index % 3]
        picture = io.BytesIO()
        Image.new("RGB", (8, 8), tuple(value + index % 32 for value in COLOURS[colour])).save(picture, "PNG")
        server.buckets["my-data"][f"{index}.png"] = StoredObject(picture.getvalue(), index + 1, {})
        asked = {"from": "human", "value": "<image>\nWhich colour?"}
        records.append(
            {"id": str(index), "image": f"{index}.png", "conversations": [asked, {"from": "gpt", "value": colour}]}
        )
    questions = [
        {"question_id": index, "image": f"{index}.png", "text": "Is it red?", "label": "no" if index % 3 else "yes"}
        for index in range(6)
    ]
    texts = {"records.json": json.dumps(records), "pope.json": "\n".join(map(json.dumps, questions))}
    for name, text in texts.items():
        server.buckets["my-data"][name] = StoredObject(text.encode(), 1, {})


def test_a_run_needs_what_terraform_grants_and_every_grant(tmp_path: Path) -> None:
    done, server = run(tmp_path, granted())
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert server.denied == []
    assert server.used.keys() == {key for key in granted() if key[1] != "my-build"}
    for key, permissions in server.used.items():
        assert permissions <= server.permissions[key]
    writers = {key for key, permissions in server.used.items() if "storage.objects.create" in permissions}
    assert writers >= {("pipeline", "my-runs"), ("trainer", "my-runs"), ("trainer", "my-mirror")}


def test_without_the_jobs_grant_on_the_data_bucket_the_evaluation_is_refused(tmp_path: Path) -> None:
    """As it was before the table: the first step found all well, and the run failed after training."""
    roles = {key: of_key for key, of_key in granted().items() if key != ("trainer", "my-data")}
    done, server = run(tmp_path, roles)
    assert done.returncode != 0
    assert {(account, bucket) for account, bucket, _ in server.denied} == {("trainer", "my-data")}
    assert "vlmpipe/runs/r1/summary.json" in server.buckets["my-runs"], "training was paid for"
