"""Another time for one module under test."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


def replace_time(monkeypatch: pytest.MonkeyPatch, module: ModuleType, **functions: Callable[..., Any]) -> None:
    """Replace functions of `time` in `module` only: with `time.sleep` itself, all threads would get the stand-in."""
    monkeypatch.setattr(module, "time", SimpleNamespace(**vars(time) | functions))
