"""Measurements of each logged step: `metrics.jsonl`.

Training adds figures by name (`loss/captions`), so a line is a step with numbers by their names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vlmpipe.trainer.storage.base import Storage
from vlmpipe.trainer.storage.records import read_lines

FILE = "metrics.jsonl"


@dataclass(frozen=True)
class StepMetrics:
    """Figures of one logged step; `step` counts optimizer steps of the run."""

    step: int
    figures: Mapping[str, object]

    def number(self, name: str) -> float | None:
        """Return the figure of that name; None where it was not measured at this step."""
        value = self.figures.get(name)
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

    def validation(self) -> dict[str, float]:
        """Return the figures of a validation by name; empty where the step has none."""
        names = [name for name in self.figures if name.startswith("validation_")]
        return {name: value for name in names if (value := self.number(name)) is not None}


def read_metrics(store: Storage) -> list[StepMetrics]:
    """Return the logged steps, in the order of the file; none where there is no file. Raises DataError."""
    if store.stat(FILE) is None:
        return []
    return [StepMetrics(int(line["step"]), line) for line in read_lines(store, FILE) if "step" in line]


def step_seconds(store: Storage) -> list[float]:
    """Return the seconds of each logged step but the first, which compiles and warms up."""
    return [seconds for line in read_metrics(store) if (seconds := line.number("step_s")) is not None][1:]
