"""Garbage is looked for between steps, and not in what was there when training began."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator

import pytest

from vlmpipe.trainer.gc_control import collect_as_usual, collect_between_steps


class Ring:
    """Holds itself, so that only a search finds it."""

    def __init__(self) -> None:
        self.own = self


@pytest.fixture(autouse=True)
def as_usual() -> Iterator[None]:
    yield
    collect_as_usual()
    gc.freeze()  # again, as tests/conftest.py: else each search goes through all that tests have imported


def test_what_loading_has_left_is_gone_when_training_begins() -> None:
    gc.disable()
    left = weakref.ref(Ring())
    collect_between_steps()
    assert left() is None


def test_what_is_there_when_training_begins_is_not_looked_through_again() -> None:
    kept = Ring()
    collect_between_steps()
    assert not any(each is kept for each in gc.get_objects())
    assert not gc.isenabled()


def test_what_training_leaves_is_found() -> None:
    collect_between_steps()
    left = weakref.ref(Ring())
    gc.collect()
    assert left() is None


AFTERWARDS = """
import gc, weakref
from vlmpipe.trainer.gc_control import collect_as_usual, collect_between_steps

class Ring:
    def __init__(self):
        self.own = self

kept = Ring()
left = weakref.ref(kept)
collect_between_steps()
collect_as_usual()
del kept
gc.collect()
print(left() is None, gc.isenabled())
"""


def test_afterwards_all_is_looked_through_as_usual() -> None:
    """In a process of its own, which has less to look through than one that runs tests."""
    done = subprocess.run([sys.executable, "-c", AFTERWARDS], capture_output=True, text=True, check=True)
    assert done.stdout == "True True\n"
