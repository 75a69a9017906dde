"""Fixture of tests that read the whole repository."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_garbage_collection() -> Iterator[None]:
    """Syntax trees of all modules are millions of objects: looking for garbage in them takes a third of a test."""
    gc.disable()
    yield
    gc.enable()
