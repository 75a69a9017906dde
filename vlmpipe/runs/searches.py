"""A search over settings: its trials, and the table that shows them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from vlmpipe.runs.run_state import RunState
from vlmpipe.runs.steps import Step
from vlmpipe.trainer.errors import ExitCode

if TYPE_CHECKING:
    from vlmpipe.config.sections.tune import Value

SEARCH_FILE = "search.json"  # in a search's folder: its metric, its goal and its number of trials
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
        """The values, as overrides of a run file."""
        shown = (f"{value:g}" if isinstance(value, float) else str(value) for value in self.values.values())
        return " ".join(f"{name}={value}" for name, value in zip(self.values, shown, strict=True))


def ranked(trials: Iterable[Trial], goal: str) -> list[Trial]:
    """The best first, those without a metric last. `goal` is MAXIMIZE or MINIMIZE."""
    sign = -1 if goal == "MAXIMIZE" else 1
    return sorted(trials, key=lambda trial: (math.inf if trial.metric is None else sign * trial.metric, trial.trial))


def table_lines(trials: Sequence[Trial], metric: str) -> list[str]:
    """For people: a line for each, under a title."""
    lines = [f"{'trial':>5}  {metric:>12}  values"]
    for trial in trials:
        shown = f"{trial.metric:.4f}" if trial.metric is not None else f"{trial.state}: {trial.error}".rstrip(": ")
        lines.append(f"{trial.trial:>5}  {shown:>12}  {trial.settings}")
    return lines


def as_steps(search_id: str, trials: Iterable[Trial], metric: str) -> RunState:
    """The trials by number, as the steps of a run for a view."""

    def step(trial: Trial) -> Step:
        result = f"{metric} {trial.metric:.4f}, " if trial.metric is not None else ""
        return Step(
            f"trial-{trial.trial}", trial.state, trial.elapsed_s, message=f"{result}{trial.error or trial.settings}"
        )

    return RunState(search_id, tuple(map(step, sorted(trials, key=lambda trial: trial.trial))))


@dataclass(frozen=True)
class SearchStatus:
    """State of a search. The trials come best first."""

    search_id: str
    uri: str
    outcome: str  # waiting, running, stopping, paused, done, stopped or failed
    metric: str
    goal: str
    num_trials: int  # planned
    trials: tuple[Trial, ...]
    error: str = ""
    resource_name: str = ""  # empty for one on this machine
    console_url: str = ""
    decision: ClassVar[None] = None  # a search alone has no gate

    @property
    def state(self) -> RunState:
        return as_steps(self.search_id, self.trials, self.metric)

    @property
    def is_over(self) -> bool:
        return self.outcome in ("done", "stopped", "failed")

    @property
    def best(self) -> Trial | None:
        return next((trial for trial in self.trials if trial.metric is not None), None)

    @property
    def exit_code(self) -> int | None:
        """The exit code; None while the search runs. One without a result has failed."""
        if not self.is_over:
            return None
        if self.outcome == "stopped":
            return int(ExitCode.PREEMPTED)
        return int(ExitCode.OK if self.outcome == "done" and self.best else ExitCode.UNEXPECTED)

    def lines(self) -> list[str]:
        """For people."""
        ended = sum(trial.state in ("done", "failed") for trial in self.trials)
        lines = [f"search {self.search_id}: {self.outcome}, {ended} of {self.num_trials} trials ended"]
        lines += [f"  error     {self.error}"] if self.error else []
        lines += table_lines(self.trials, self.metric) if self.trials else []
        table = {"trials": f"{self.uri}/trial-N" if self.uri else "", "job": self.resource_name}
        table["console"] = self.console_url
        if self.resource_name and not self.is_over:
            table["to stop"] = f"vlmpipe cancel {self.search_id}"
        return lines + [f"  {name:<9} {value}" for name, value in table.items() if value]

    def as_json(self) -> dict[str, object]:
        fields = ("search_id", "uri", "outcome", "exit_code", "metric", "goal", "num_trials")
        more = ("error", "resource_name", "console_url")
        return {
            **{name: getattr(self, name) for name in fields},
            **{name: getattr(self, name) or None for name in more},
            "trials": [vars(trial) for trial in self.trials],
        }
