"""Tests of prepared data write many small files, each of which is flushed: their folders are in memory."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def tmp_path(memory: Path) -> Path:
    return memory
