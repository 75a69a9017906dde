"""Side-by-side timing: work of both sides in turn, round after round, in CPU time of the process next to wall time."""

from __future__ import annotations

import argparse
import gc
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


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


def interleaved(sides: Mapping[str, Callable[[], T]], rounds: int, *, warm_up: bool = True) -> dict[str, list[T]]:
    """Call every side once a round; results by side. With `warm_up` a first round is thrown away.

    Sides take turns, and turn their order each round, so that a machine that slows down does not favour one.
    """
    results: dict[str, list[T]] = {name: [] for name in sides}
    for number in range(-1 if warm_up else 0, rounds):
        for name in sides if number % 2 else reversed(list(sides)):
            gc.enable()  # the training loop turns it off for good
            gc.collect()
            result = sides[name]()
            if number >= 0:
                results[name].append(result)
    return results


def interleaved_work(works: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[Measured]]:
    """`interleaved` over plain work, of which all is timed."""
    return interleaved({name: partial(clocked, work) for name, work in works.items()}, rounds)


def close(left: Iterable[float], right: Iterable[float], tolerance: float) -> bool:
    """Whether two series of losses are equal within a relative tolerance."""
    return all(math.isclose(a, b, rel_tol=tolerance) for a, b in zip(left, right, strict=True))


def options(description: str | None, parts: Sequence[str] = ()) -> argparse.Namespace:
    """The command line of a benchmark; one in `parts` can be asked for some of them (`only`: all by default)."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="a short form that shows that it works; not for figures")
    parser.add_argument("--rounds", type=int, help="rounds of each comparison")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything as JSON")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table as Markdown")
    if parts:
        parser.add_argument("--only", nargs="+", choices=parts, default=parts, help="some of its parts")
    return parser.parse_args()
