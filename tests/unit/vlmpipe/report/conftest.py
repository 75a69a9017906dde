"""Runs that reports are made of."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.reports import make_run


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("finished"))


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy with few answers and steps, which a test may change. It points at the prepared data of `finished`."""
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    for name, lines in (("predictions.jsonl", 8), ("metrics.jsonl", 4)):
        text = (run / name).read_text(encoding="utf-8")
        (run / name).write_text("".join(text.splitlines(keepends=True)[:lines]), encoding="utf-8")
    return run


@pytest.fixture
def whole_run(finished: Path, tmp_path: Path) -> Path:
    """As `run`, with all answers and steps."""
    return Path(shutil.copytree(finished, tmp_path / "run"))
