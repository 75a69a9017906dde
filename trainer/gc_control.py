"""Garbage collection control: off while models load, frozen while training runs."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """No search for cycles of objects. What modules make when they are loaded stays, and to search it again and again
    is a fifth of the time in which torch and transformers are loaded, and an eighth of that of compiling pipelines.

    Where modules were loaded, it counts as old afterwards: the frequent searches, of what is new, pass it over.
    """
    was_enabled, num_modules = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            # Where objects of others are frozen they would thaw, and to count those takes longer the more there are.
            if len(sys.modules) > num_modules and not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()  # into the oldest generation
            gc.enable()


def collect_between_steps() -> None:
    """Look for garbage from now on only when `gc.collect` is called, and only among later objects.

    To look through all that torch and transformers are made of takes a fifth of a second: at every 200th step, that is
    1 % of steps of 100 ms.
    """
    gc.disable()
    gc.collect()  # what loading has left; afterwards it would stay for good
    gc.freeze()


def collect_as_usual() -> None:
    """Restore the garbage collection that Python starts with."""
    gc.unfreeze()
    gc.enable()
