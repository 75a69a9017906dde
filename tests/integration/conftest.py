"""Stores for the storage tests: a folder, and the Cloud Storage client against our fake server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.gcs import FakeGcs
from trainer.storage_gcs import RETRY, GcsStorage

QUICK_RETRY = RETRY.with_delay(initial=0.01, maximum=0.05).with_timeout(5.0)


@pytest.fixture
def gcs_server() -> Iterator[FakeGcs]:
    with FakeGcs(buckets=["bucket"], page_size=3) as server:
        yield server


@pytest.fixture
def gcs(gcs_server: FakeGcs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GcsStorage:
    monkeypatch.setenv("VLMPIPE_CACHE_DIR", str(tmp_path / "cache"))
    return GcsStorage("gs://bucket/some/root", client=gcs_server.client(), retry=QUICK_RETRY)
