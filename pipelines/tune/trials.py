"""Trials of a search: their outcomes, best first, and the table that shows them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vlmpipe.config.tune import Value
from vlmpipe.runs.local.state import RunState, Step

TABLE = "trials.json"


@dataclass(frozen=True)
class Trial:
    """One line of the table. `metric` is None for a trial that has not reported it, or failed."""

    trial: int
    values: dict[str, Value]
    metric: float | None
    error: str = ""
    state: str = "done"  # waiting, running, done or failed
    elapsed_s: float = 0.0

    @property
    def settings(self) -> str:
        """Its values, as overrides of a run file."""
        shown = (f"{value:g}" if isinstance(value, float) else str(value) for value in self.values.values())
        return " ".join(f"{name}={value}" for name, value in zip(self.values, shown, strict=True))


def ranked(trials: Iterable[Trial], goal: str) -> list[Trial]:
    """The best first; those without a metric last. `goal` is MAXIMIZE or MINIMIZE."""
    sign = -1 if goal == "MAXIMIZE" else 1
    return sorted(trials, key=lambda one: (math.inf if one.metric is None else sign * one.metric, one.trial))


def table_lines(trials: Sequence[Trial], metric: str) -> list[str]:
    """For people: a line for each, under a title."""
    lines = [f"{'trial':>5}  {metric:>12}  values"]
    for one in trials:
        shown = f"{one.metric:.4f}" if one.metric is not None else f"{one.state}: {one.error}".rstrip(": ")
        lines.append(f"{one.trial:>5}  {shown:>12}  {one.settings}")
    return lines


def as_steps(search_id: str, trials: Iterable[Trial], metric: str) -> RunState:
    """The trials in the order of their numbers, as a view shows the steps of a run."""

    def step(one: Trial) -> Step:
        found = f"{metric} {one.metric:.4f}, " if one.metric is not None else ""
        return Step(f"trial-{one.trial}", one.state, one.elapsed_s, message=f"{found}{one.error or one.settings}")

    return RunState(search_id, tuple(map(step, sorted(trials, key=lambda one: one.trial))))
