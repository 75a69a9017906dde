"""What tests of every kind share."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

MEMORY = Path("/dev/shm")


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder for a few small files in memory, where there is one: flushing a file to the disk costs nothing there."""
    with tempfile.TemporaryDirectory(prefix="vlmpipe-test-", dir=MEMORY if MEMORY.is_dir() else None) as folder:
        yield Path(folder)
