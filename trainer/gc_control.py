"""Garbage collection control: off while models load, frozen while training runs."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """No search for cycles of objects. What modules make when they are loaded stays, and to search it again and again
    is a fifth of the time in which torch and transformers are loaded, and an eighth of that of compiling pipelines.

    Afterwards it counts as old: the frequent searches, of what is new, pass it over.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if not gc.get_freeze_count():  # else objects that others froze would thaw
                gc.freeze()
                gc.unfreeze()  # into the oldest generation
            gc.enable()


def collect_between_steps() -> None:
    """From now on garbage is only looked for when `gc.collect` is called, and only among what is made from now on.

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
