"""The registry of what can go wrong: every test here says which fault it makes and what comes of it.

`make crash-matrix` prints it with each outcome; docs/reference/failure-modes.md holds it as text.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

FULL = os.environ.get("VLMPIPE_CRASH_MATRIX") == "full"  # else the short form, in the default suite
GROUPS = (
    "crash points",
    "storage",
    "bytes",
    "concurrency",
    "process",
    "disk",
    "outage",
    "mirror",
    "topology",
    "clock",
    "signature",
    "any order",
)
Test = TypeVar("Test", bound=Callable[..., None])


@dataclass(frozen=True)
class Case:
    """One fault and its outcome. `test` is file::function, `value` what `{}` in the template stands for."""

    group: str
    template: str
    outcome: str
    test: str
    value: str = ""

    @property
    def what(self) -> str:
        return self.template.format(self.value)


CASES: dict[tuple[str, str], Case] = {}  # by (test, value)


def case(
    group: str, what: str, outcome: str, *, short: Collection[Any] | None = None, **parameter: Iterable[Any]
) -> Callable[[Test], Test]:
    """Register a test. With a parameter it is registered, and called, once for each value, which `{}` stands for.

    Args:
        short: the values that the short form calls it with; all when left out.
    """
    assert len(parameter) <= 1 and group in GROUPS

    def register(test: Test) -> Test:
        place = f"{Path(test.__code__.co_filename).name}::{test.__name__}"
        for name, values in parameter.items():
            values = list(values)
            for value in values:
                CASES[place, str(value)] = Case(group, what, outcome, place, str(value))
            called = [value for value in values if FULL or short is None or value in short]
            return pytest.mark.parametrize(name, called, ids=str)(test)
        CASES[place, ""] = Case(group, what, outcome, place)
        return test

    return register
