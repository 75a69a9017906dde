"""Side-by-side timing: sides take turns, round after round, in CPU time of the process next to wall time."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

LEAST_ROUNDS = 2  # a median of one is none


@dataclass(frozen=True)
class Measured:
    """What one side used for `units` of work."""

    cpu_s: float  # of the whole process, all threads
    wall_s: float
    units: float

    @property
    def cpu_per_unit(self) -> float:
        return self.cpu_s / self.units

    @property
    def wall_per_unit(self) -> float:
        return self.wall_s / self.units


class Clock:
    """CPU time of the process and wall time since it was made."""

    def __init__(self) -> None:
        self._cpu_s, self._wall_s = time.process_time(), time.perf_counter()

    def stop(self, units: float) -> Measured:
        """What was used since the start, for `units` of work."""
        return Measured(time.process_time() - self._cpu_s, time.perf_counter() - self._wall_s, units)


def clocked(work: Callable[[], float]) -> Measured:
    """Run `work`, which returns the units of work that it did."""
    clock = Clock()
    return clock.stop(work())


@dataclass(frozen=True)
class RoundLimit:
    """After the first `least` rounds none that would probably end after `seconds`."""

    seconds: float
    least: int = LEAST_ROUNDS

    def allows(self, number: int, done: int, elapsed_s: float) -> bool:
        """Whether round `number` (from 0) may begin. `done` counts the warm-up, too: it takes as long as a round."""
        return number < self.least or elapsed_s * (done + 1) / max(done, 1) <= self.seconds


def interleaved(
    sides: Mapping[str, Callable[[], T]],
    rounds: int,
    *,
    warm_up: bool = True,
    may_go_on: Callable[[int, int], bool] = lambda _number, _done: True,
) -> dict[str, list[T]]:
    """Call every side once a round; results by side. With `warm_up` a first round is thrown away.

    Sides take turns, in reverse order every other round, so that a machine that slows down does not favour one.
    `may_go_on(number, done)` is asked before each round, with its number from 0 (-1: the warm-up) and the rounds done,
    the warm-up among them.
    """
    results: dict[str, list[T]] = {name: [] for name in sides}
    first = -1 if warm_up else 0
    for number in range(first, rounds):
        if not may_go_on(number, number - first):
            break
        for name in sides if number % 2 else reversed(list(sides)):
            gc.enable()  # the training loop turns it off for good
            gc.collect()
            result = sides[name]()
            if number >= 0:
                results[name].append(result)
    return results


def close(left: Iterable[float], right: Iterable[float], tolerance: float) -> bool:
    """Whether two series of losses are equal within a relative tolerance."""
    return all(math.isclose(a, b, rel_tol=tolerance) for a, b in zip(left, right, strict=True))


def timed_s(work: Callable[[], object]) -> Callable[[], float]:
    """`work` as a side that returns the wall seconds that it took."""

    def timed() -> float:
        started_s = time.perf_counter()
        work()
        return time.perf_counter() - started_s

    return timed
