"""How far runs of sources that no rate was fitted to were from their forecasts: the range around a planned time."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal, get_args

from pydantic import TypeAdapter

from vlmpipe.catalog.machines import read_yaml
from vlmpipe.planner.scenario import Scenario

Kind = Literal["text", "images", "float8", "small_compiled", "blackwell", "other_gpus"]
BLACKWELL = 10.0  # compute capability of B200 and GB200
SMALL_PARAMETERS = 3_000_000_000  # a model below it computes little in each kernel


@dataclass(frozen=True)
class Interval:
    """Shares of the planned time between which 8 of 10 runs of this kind are expected."""

    low: float
    high: float
    origin: str  # a sentence, or several


def interval_of(case: Scenario, *, measured: bool = False) -> Interval:
    """The range for this kind of run, or around a rate that a run of the user's own measured."""
    intervals = _intervals()
    if measured:
        text = intervals["text"]
        return Interval(
            text.low, text.high, "The range around a measured rate is taken as that of published runs of text."
        )
    of_kinds = [intervals[kind] for kind in kinds_of(case)]
    return Interval(
        min(interval.low for interval in of_kinds),
        max(interval.high for interval in of_kinds),
        " ".join(interval.origin for interval in of_kinds),
    )


def kinds_of(case: Scenario) -> list[Kind]:
    """Classes of a run that decide the error of its forecast; several may apply."""
    assert case.gpu is not None
    kinds: list[Kind] = ["images" if case.load.images_per_sequence else "text"]
    if case.config.train.float8 != "none":
        kinds.append("float8")
    if case.compiling.on and case.shape.total_parameters < SMALL_PARAMETERS:
        kinds.append("small_compiled")
    if not case.gpu.has_published_runs:
        kinds.append("other_gpus")
    elif case.gpu.compute_capability >= BLACKWELL:
        kinds.append("blackwell")
    return kinds


@functools.cache
def _intervals() -> dict[Kind, Interval]:
    data = read_yaml("intervals.yaml")
    return TypeAdapter(dict[Kind, Interval]).validate_python({kind: data[kind] for kind in get_args(Kind)})
