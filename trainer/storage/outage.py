"""Outages: failures in a row of what passes by itself (`UserError.passes`), and waiting for their end.

A store that is away for some minutes, or a disk that is full, does not end a job that has hours of training in memory.
Commands that a person waits for ask it for `SOON_S`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import TypeVar

from vlmpipe.trainer.errors import UserError, print_warning

T = TypeVar("T")
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 60.0  # between two tries; each wait is twice the one before
SOON_S = 5.0  # that a request may take where a person waits for it


class _Waiting:
    """Open blocks of `answering_soon`, of all threads."""

    def __init__(self) -> None:
        self.lock, self.open = threading.Lock(), 0


_WAITING = _Waiting()


@contextlib.contextmanager
def answering_soon() -> Iterator[None]:
    """Let stores that are opened inside the block ask for SOON_S instead of for minutes.

    Holds for all threads.
    """
    with _WAITING.lock:
        _WAITING.open += 1
    try:
        yield
    finally:
        with _WAITING.lock:
            _WAITING.open -= 1


def must_answer_soon() -> bool:
    """Return whether a block of `answering_soon` is open."""
    return _WAITING.open > 0


class Outage:
    """Counts failures in a row, and how long they have lasted."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_s = 0.0
        self._began = ""
        self.failures = 0

    def failed(self) -> bool:
        """Count a failure. Whether it is the first one in a row."""
        if not self.failures:
            self._began_s, self._began = self._clock(), f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
        self.failures += 1
        return self.failures == 1

    def ended(self) -> float:
        """Count a success. Returns how many seconds the failures before it lasted; 0.0 when there were none."""
        lasted_s = self.seconds
        self.failures = 0
        return lasted_s

    @property
    def seconds(self) -> float:
        """Since the first failure; 0.0 without one."""
        return self._clock() - self._began_s if self.failures else 0.0

    @property
    def since(self) -> str:
        """When the first failure was, as text."""
        return self._began


def patiently(
    doing: str,
    action: Callable[[], T],
    *,
    limit_s: float,
    step: str = "train",
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """The result of `action`, repeated while it fails with errors that pass by themselves.

    Warns of the first one. Raises the last one, with the time of the first, after `limit_s` of failures; every other
    error at once.
    """
    outage, wait_s = Outage(clock), FIRST_WAIT_S
    while True:
        try:
            result = action()
        except UserError as error:
            if not error.passes:
                raise
            first = outage.failed()
            if outage.seconds >= limit_s:
                raise given_up(f"{doing} failed", outage, limit_s, error) from error
            if first:
                print_warning(f"{doing} failed, and is tried again for {limit_s:,.0f} s: {error.found}", step=step)
            sleep(min(wait_s, max(0.0, limit_s - outage.seconds)))
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)
            continue
        if lasted_s := outage.ended():
            print(f"{step}: {doing} succeeded after {lasted_s:,.0f} s", flush=True)
        return result


@contextlib.contextmanager
def warned(doing: str, *, step: str = "train") -> Iterator[None]:
    """Make a warning of an error in the block that passes by itself."""
    try:
        yield
    except UserError as error:
        if not error.passes:
            raise
        print_warning(f"{doing} failed: {error.found}", step=step)


def given_up(what: str, outage: Outage, limit_s: float, error: UserError) -> UserError:
    """The error of an outage that lasted longer than `limit_s`: the last failure's, with the time of the first."""
    tries = f"{outage.failures} tries" if outage.failures > 1 else "one try"
    return UserError(
        f"{what} since {outage.since}, {tries} in {outage.seconds:,.0f} s: {error.found}",
        expected=f"success within {limit_s:,.0f} s (checkpoint.max_s_without_commit)",
        fix=error.fix or "mend what is named; the same command then continues",
        code=error.code,
        passes=False,
    )
