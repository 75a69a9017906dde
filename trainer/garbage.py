"""Loading much without looking for garbage in it."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """No search for cycles of objects. What modules make when they are loaded stays, and to search it again and again
    is a sixth of the time in which torch and transformers are loaded, and an eighth of that of compiling pipelines."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
