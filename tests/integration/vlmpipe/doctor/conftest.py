"""The project that the doctor's tests examine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.google_apis import FakeGoogle
from tests.support.vertex.doctor_project import project


@pytest.fixture
def google(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeGoogle]:
    with project(monkeypatch, tmp_path) as (server, _):
        yield server
