"""Tests of the whole repository read its modules as syntax trees."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _without_garbage_collection(no_garbage_collection: None) -> None:
    pass
