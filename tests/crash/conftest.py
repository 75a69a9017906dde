"""Stores for the fault matrix: a folder, and the Cloud Storage client against the strict fake server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.gcs.server import FakeGcs
from tests.support.crash.cases import FULL
from vlmpipe.trainer.storage.base import Storage
from vlmpipe.trainer.storage.gcs import RETRY, GcsStorage
from vlmpipe.trainer.storage.local import LocalStorage

IMPATIENT = RETRY.with_delay(initial=0.01, maximum=0.05).with_timeout(2.0)
STALL_S = 0.3


@pytest.fixture
def tmp_path(memory: Path) -> Path:
    return memory


@pytest.fixture
def server() -> Iterator[FakeGcs]:
    with FakeGcs(buckets=["bucket"], page_size=5) as running:
        yield running


@pytest.fixture
def gcs(server: FakeGcs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GcsStorage:
    monkeypatch.setenv("VLMPIPE_CACHE_DIR", str(tmp_path / "cache"))
    return GcsStorage("gs://bucket/runs/a", client=server.client(), retry=IMPATIENT, timeout_s=STALL_S)


@pytest.fixture
def local(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path / "run")


@pytest.fixture(params=["local", "gcs"] if FULL else ["local"])
def store(request: pytest.FixtureRequest) -> Storage:
    found: Storage = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    """The disk of the machine that trains."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    return folder
