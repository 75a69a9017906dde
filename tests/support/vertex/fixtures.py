"""Fixtures of tests that look at a run on Vertex AI: the strict fake, its pipeline job, the run's folder.

A test file asks for them by `pytest_plugins = ("tests.support.vertex.fixtures",)`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from google.cloud.aiplatform_v1.types import PipelineJob
from google.protobuf import json_format

from tests.fakes.gcs.server import FakeGcs
from tests.fakes.vertex.server import FakeVertex
from tests.support.vertex.runs import JOB, RUN
from tests.support.vertex.submit_runs import CONFIG, MINE, Submit, commander, running_vertex
from vlmpipe.config.run_config import load_run_file
from vlmpipe.pipelines.compile import compile_pipeline
from vlmpipe.platforms.vertex.pipeline_job import prepare
from vlmpipe.runs import watch


@pytest.fixture
def vertex(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeVertex]:
    for name in ("VERTEX_PROJECT_ID", "VERTEX_LOCATION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(watch, "SERVICE_POLL_S", 0.0)
    with running_vertex(monkeypatch) as server:
        yield server


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeGcs]:
    with FakeGcs(buckets=["example-bucket"]) as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.endpoint)
        monkeypatch.setenv("VLMPIPE_CACHE_DIR", str(tmp_path / "cache"))
        yield server


@pytest.fixture
def vlmpipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Submit:
    return commander(tmp_path, monkeypatch, capfd)


@pytest.fixture(scope="session")
def created(tmp_path_factory: pytest.TempPathFactory) -> PipelineJob:
    """The run's job as the fake took it: compiling and parsing take longer than all else in these tests."""
    config = load_run_file(CONFIG, [MINE])
    path = compile_pipeline(config, "vertex", tmp_path_factory.mktemp("compiled") / "pipeline.yaml").path
    submission = prepare(config, path, job_id=JOB)
    body = json_format.MessageToJson(PipelineJob.pb(submission.job))
    with FakeVertex() as server:
        return server.create(submission.place.parent, JOB, body.encode())


@pytest.fixture
def started(vertex: FakeVertex, bucket: FakeGcs, created: PipelineJob) -> FakeVertex:
    """The run, just submitted."""
    vertex.jobs[RUN] = PipelineJob(created)
    vertex.runs.begin(vertex.jobs[RUN])
    return vertex
