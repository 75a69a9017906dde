"""Stores for the storage tests, and what the tests of local jobs with small scripts for replicas share."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.auth.credentials import AnonymousCredentials
from google.cloud import storage

from tests.fakes.gcs.server import FakeGcs
from tests.support.gcs import QUICK_RETRY, TESTBENCH
from tests.support.s3 import S3Server, s3_server
from vlmpipe.platforms.local.jobs import supervisor as local_supervisor
from vlmpipe.trainer.storage.gcs import GcsStorage
from vlmpipe.trainer.storage.s3 import S3Storage


@pytest.fixture
def gcs_server() -> Iterator[FakeGcs]:
    with FakeGcs(buckets=["bucket"], page_size=3) as server:
        yield server


@pytest.fixture
def gcs(gcs_server: FakeGcs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GcsStorage:
    monkeypatch.setenv("VLMPIPE_CACHE_DIR", str(tmp_path / "cache"))
    return GcsStorage("gs://bucket/some/root", client=gcs_server.client(), retry=QUICK_RETRY)


@pytest.fixture
def gcs_testbench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GcsStorage:
    """A store in Google's storage-testbench, which `make storage-conformance` gives the address of."""
    monkeypatch.setenv("VLMPIPE_CACHE_DIR", str(tmp_path / "cache"))
    endpoint = {"api_endpoint": os.environ[TESTBENCH]}
    client = storage.Client(project="laws", credentials=AnonymousCredentials(), client_options=endpoint)
    bucket = client.create_bucket(f"laws-{uuid.uuid4().hex}")
    return GcsStorage(f"gs://{bucket.name}/some/root", client=client, retry=QUICK_RETRY)


@pytest.fixture(scope="session")
def s3_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """One server for the tests of a process: it takes seconds to start."""
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def s3(s3_endpoint: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> S3Storage:
    """A store of the test's own in a real S3 server, to which the environment points."""
    monkeypatch.setenv("VLMPIPE_CACHE_DIR", str(tmp_path / "cache"))
    for name, value in s3_endpoint.environment().items():
        monkeypatch.setenv(name, value)
    return S3Storage(f"s3://bucket/{uuid.uuid4().hex}/some/root")


@pytest.fixture
def alive(tmp_path: Path) -> Iterator[int]:
    """Read end of the FIFO that every script of the test holds open."""
    os.mkfifo(tmp_path / "alive")
    reader = os.open(tmp_path / "alive", os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(reader, True)
    yield reader
    os.close(reader)


@pytest.fixture
def short_graces(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FINISH_S", "REASON_S", "FAILED_GRACE_S"):
        monkeypatch.setattr(local_supervisor, name, 0.3)
