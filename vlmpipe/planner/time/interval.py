"""How far published runs were from their forecasts: the range around a planned time."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal, get_args

from vlmpipe.catalog.machines import read_yaml
from vlmpipe.planner.scenario import Scenario

Kind = Literal["text", "images", "other_gpus"]


@dataclass(frozen=True)
class Interval:
    """Shares of the planned time between which 8 of 10 runs of this kind are expected."""

    low: float
    high: float
    origin: str  # a sentence


def interval_of(case: Scenario, *, measured: bool = False) -> Interval:
    """The range for this kind of run, or around a rate that a run of the user's own measured."""
    assert case.gpu is not None
    kind: Kind = "images" if case.load.images_per_sequence else "text"
    if measured:
        return _measured()
    if not case.gpu.has_published_runs:
        kind = "other_gpus"
    return _intervals()[kind]


def _measured() -> Interval:
    text = _intervals()["text"]
    return Interval(text.low, text.high, "The range around a measured rate is taken as that of published runs of text.")


@functools.cache
def _intervals() -> dict[Kind, Interval]:
    data = read_yaml("intervals.yaml")
    return {kind: Interval(**data[kind]) for kind in get_args(Kind)}
