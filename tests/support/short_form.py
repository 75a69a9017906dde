"""What the default suite leaves to `make test-whole`: further cases of a law whose first cases it does check."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from typing import TypeVar

import pytest

Value = TypeVar("Value")

WHOLE = os.environ.get("VLMPIPE_TESTS") == "whole"
# Times a limit: the long form also runs beside other work, as do programs that run tests (tests/numerics).
PATIENCE = int(os.environ.get("VLMPIPE_TESTS_PATIENCE") or (10 if WHOLE else 1))


def chosen(cases: Mapping[str, Value], short: Callable[[str], bool]) -> dict[str, Value]:
    """All cases for `make test-whole`, else those that `short` says yes to by their name."""
    found = {name: value for name, value in cases.items() if WHOLE or short(name)}
    assert found, "the short form must check something"
    return found


# It logs warnings when it is imported, also by peft, so the environment of `make install-dev` does not have it.
needs_torchao = pytest.mark.skipif(
    not WHOLE and importlib.util.find_spec("torchao") is None, reason="torchao is not installed (the extra float8)"
)
