"""The result of a benchmark run: its tables, JSON and Markdown, with what is needed to judge and repeat them."""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.support.environment import environment
from benchmarks.support.timing import Measured

HOW_TO_READ = (
    "A ratio above 1 is in favour of ours. CPU time is that of the process, one thread. The sides took turns, and a "
    "ratio is the median of the rounds' own ratios. A row without a baseline is a plain figure."
)


class UnfairError(Exception):
    """The two sides of a comparison did not do the same work, so their ratio means nothing."""


def require_fair(held: bool, what: str, *, found: str = "") -> None:
    """Raises UnfairError, with what was found, when a condition of a fair comparison did not hold."""
    if not held:
        reason = f" ({found})" if found else ""
        raise UnfairError(f"this must hold for a fair comparison, and does not: {what}{reason}")


@dataclass(frozen=True)
class Side:
    """One side of a claim: what it is, and its value in each round."""

    label: str
    values: Sequence[float]


@dataclass(frozen=True)
class Row:
    """A figure, or a ratio of two."""

    claim: str
    data: str
    unit: str
    ours_label: str
    ours: float
    rounds: int
    quartiles: tuple[float, float]  # over the rounds: of the ratio, or of `ours` where there is no baseline
    baseline_label: str = ""
    baseline: float | None = None
    ratio: float | None = None
    wall_ratio: float | None = None

    def cells(self) -> list[str]:
        low, high = self.quartiles
        numbers = [f"{self.ours:.4g}", "", "", f"{low:.3g}–{high:.3g}", ""]
        if self.baseline is not None and self.ratio is not None:
            numbers[1:4] = [f"{self.baseline:.4g}", f"{self.ratio:.2f}", f"{low:.2f}–{high:.2f}"]
        if self.wall_ratio is not None:
            numbers[4] = f"{self.wall_ratio:.2f}"
        labels = [self.claim, self.data, self.ours_label, self.baseline_label, self.unit]
        return [*labels, *numbers, str(self.rounds)]


@dataclass(frozen=True)
class Prediction:
    """A figure of the planner beside what was measured."""

    what: str
    case: str
    unit: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Relative to what was measured; above 0 the planner says too much."""
        return self.predicted / self.measured - 1

    def cells(self) -> list[str]:
        numbers = [f"{self.predicted:,.4g}", f"{self.measured:,.4g}", f"{self.error:+.1%}"]
        return [self.what, self.case, self.unit, *numbers]


@dataclass(frozen=True)
class Answer:
    """What two sides did in the same case, in words."""

    case: str
    ours: str
    baseline: str

    def cells(self) -> list[str]:
        return [self.case, self.ours, self.baseline]


# Of each table its columns, of which the first are text.
ROW_COLUMNS = ("claim", "data", "ours", "baseline", "unit", "ours", "baseline", "ratio", "quartiles", "wall ratio", "n")
ROW_TEXTS = 5
PREDICTION_COLUMNS = ("what", "case", "unit", "predicted", "measured", "error")
PREDICTION_TEXTS = 3
ANSWER_COLUMNS = ("case", "ours", "baseline")


@dataclass
class Report:
    """The figures of one benchmark run, and the checks that make them comparable."""

    title: str
    settings: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    predictions: list[Prediction] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    checks: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # how to read some of the rows
    load_at_start: float = field(default_factory=lambda: os.getloadavg()[0])

    def require(self, held: bool, what: str, *, found: str = "") -> None:
        """Note a condition of a fair comparison, which is part of the report. Raises as `require_fair`."""
        require_fair(held, what, found=found)
        if what not in self.checks:
            self.checks.append(what)

    def note(self, text: str) -> None:
        """Add a note once."""
        if text not in self.notes:
            self.notes.append(text)

    def compare(
        self, claim: str, data: str, unit: str, ours: Side, baseline: Side, *, wall_ratio: float | None = None
    ) -> None:
        """A claim about values of which more is better.

        The ratio is the median of the rounds' own ratios, so that a slow minute weighs on both sides.
        """
        ratios = [mine / other for mine, other in zip(ours.values, baseline.values, strict=True)]
        medians = [statistics.median(side.values) for side in (ours, baseline)]
        shown = (ours.label, medians[0], len(ratios), _quartiles(ratios), baseline.label, medians[1])
        self.rows.append(Row(claim, data, unit, *shown, statistics.median(ratios), wall_ratio))

    def compare_rates(
        self, claim: str, data: str, unit: str, ours: tuple[str, list[Measured]], baseline: tuple[str, list[Measured]]
    ) -> None:
        """A claim about units of work per CPU second."""
        sides = [Side(label, [1 / each.cpu_per_unit for each in found]) for label, found in (ours, baseline)]
        pairs = zip(ours[1], baseline[1], strict=True)
        wall_ratio = statistics.median(other.wall_per_unit / mine.wall_per_unit for mine, other in pairs)
        self.compare(claim, data, f"{unit} / CPU s", *sides, wall_ratio=wall_ratio)

    def figure(self, claim: str, data: str, unit: str, ours: Side) -> None:
        """A plain figure, with nothing to compare it to."""
        median = statistics.median(ours.values)
        self.rows.append(Row(claim, data, unit, ours.label, median, len(ours.values), _quartiles(ours.values)))

    def predict(self, what: str, case: str, unit: str, predicted: float, measured: float) -> None:
        """A figure of the planner beside what was measured."""
        self.predictions.append(Prediction(what, case, unit, predicted, measured))

    def answer(self, case: str, ours: str, baseline: str) -> None:
        """What two sides did in the same case, in words."""
        self.answers.append(Answer(case, ours, baseline))

    def summary(self) -> list[str]:
        """Of each kind of prediction: their number, the median error and the largest, without signs."""
        lines = []
        for what in dict.fromkeys(row.what for row in self.predictions):
            errors = [abs(row.error) for row in self.predictions if row.what == what]
            middle, largest = statistics.median(errors), max(errors)
            lines.append(f"{what}: {len(errors)} rows, median error {middle:.1%}, largest {largest:.1%}")
        return lines

    def publish(self, *, as_json: Path | None = None, as_markdown: Path | None = None) -> None:
        """Print the tables; write the files that were asked for."""
        about = environment(self.title, self.load_at_start)
        console = Console(width=None if sys.stdout.isatty() else 200, highlight=False)
        for columns, texts, cells in self._tables():
            table = Table(title=self.title, title_justify="left")
            for number, name in enumerate(columns):
                table.add_column(name, justify="left" if number < texts else "right")
            for row in cells:
                table.add_row(*row)
            console.print(table)
        for line in self._sentences(about):
            console.print(line, markup=False)
        if as_json:
            content = about | {"settings": self.settings, "checks": self.checks, "notes": self.notes}
            content |= {"rows": [asdict(row) for row in self.rows], "summary": self.summary()}
            content |= {"predictions": [asdict(row) | {"error": row.error} for row in self.predictions]}
            content |= {"answers": [asdict(row) for row in self.answers]}
            as_json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        if as_markdown:
            as_markdown.write_text("\n".join(self._markdown(about)) + "\n", encoding="utf-8")

    def _tables(self) -> Iterator[tuple[Sequence[str], int, list[list[str]]]]:
        """Columns, how many of them are text, and cells."""
        if self.rows:
            yield ROW_COLUMNS, ROW_TEXTS, [row.cells() for row in self.rows]
        if self.predictions:
            yield PREDICTION_COLUMNS, PREDICTION_TEXTS, [row.cells() for row in self.predictions]
        if self.answers:
            yield ANSWER_COLUMNS, len(ANSWER_COLUMNS), [row.cells() for row in self.answers]

    def _sentences(self, about: dict[str, Any]) -> list[str]:
        settings = ", ".join(f"{name} {value}" for name, value in self.settings.items())
        lines = [*self.summary(), f"{about['machine']}; {about['shared']}; {settings}."]
        lines += [HOW_TO_READ] if self.rows else []
        return [*lines, *self.notes, *(["Checked: " + "; ".join(self.checks) + "."] if self.checks else [])]

    def _markdown(self, about: dict[str, Any]) -> list[str]:
        versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
        lines = [f"# {about['title']}", "", f"{about['date']}. `{about['command']}`. Versions: {versions}.", ""]
        lines += [text for sentence in self._sentences(about) for text in (sentence, "")]
        for columns, texts, cells in self._tables():
            rule = ["---"] * texts + ["--:"] * (len(columns) - texts)
            lines += [*[_line(row) for row in (columns, rule, *cells)], ""]
        return lines[:-1]


def _line(cells: Iterable[str]) -> str:
    """A line of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    low, high = np.percentile(values, [25, 75])
    return float(low), float(high)
