"""Saves that failed: training continues, since its state is in memory, and saves again until a time limit."""

from __future__ import annotations

import time
from collections.abc import Callable

from vlmpipe.trainer.errors import UserError, print_warning
from vlmpipe.trainer.storage.outage import Outage, given_up

RETRY_S = 60.0  # from a failure to the next save


class FailedSaves:
    """Counts the saves that failed since the last COMMIT, and warns of each.

    Only failures that pass by themselves (`UserError.passes`) are counted; `clock` gives seconds. `quiet` is for other
    ranks than the first: they count what they would end with, the one with the cause included, and say nothing.
    """

    def __init__(
        self,
        limit_s: float,
        *,
        retry_s: float | None = None,
        quiet: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit_s, self._clock, self._quiet = limit_s, clock, quiet
        self.retry_s = RETRY_S if retry_s is None else retry_s
        self._outage, self._last_s = Outage(clock), 0.0
        self._warnings: list[str] = []  # not yet in the step's record

    @property
    def is_due(self) -> bool:
        """Return whether the last save failed, and so long ago that the next one may begin."""
        return bool(self._outage.failures) and self._clock() - self._last_s >= self.retry_s

    @property
    def is_waiting(self) -> bool:
        """Return whether the last save failed, and the next one may not begin yet."""
        return bool(self._outage.failures) and not self.is_due

    def count(self, step: int, error: UserError) -> UserError | None:
        """Count a save of `step` that failed. Returns the error to end with, None while training continues."""
        if not error.passes:
            return error
        self._outage.failed()
        self._last_s = self._clock()
        left_s = self._limit_s - self._outage.seconds
        if left_s <= 0:
            return given_up("no checkpoint was committed", self._outage, self._limit_s, error)
        self.warn(
            f"the checkpoint of step {step} is not saved: {error.found}. Training continues and saves again in "
            f"{self.retry_s:,.0f} s; without a COMMIT it ends in {left_s:,.0f} s (checkpoint.max_s_without_commit)"
        )
        return None

    def committed(self, step: int) -> None:
        """A save of `step` was committed."""
        failures = self._outage.failures
        if (lasted_s := self._outage.ended()) and not self._quiet:
            saves = "one save" if failures == 1 else f"{failures} saves"
            print(f"train: step {step} is committed; {saves} failed in the {lasted_s:,.0f} s before", flush=True)

    def warn(self, text: str) -> None:
        """Print a warning, and keep it for the step's record."""
        if not self._quiet:
            print_warning(text)
            self._warnings.append(text)

    def take_warnings(self) -> list[str]:
        """The warnings since the last call."""
        # One by one: the thread that saves may add to them.
        return [self._warnings.pop(0) for _ in range(len(self._warnings))]
