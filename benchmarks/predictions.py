"""Predicted against measured, a line each, with the error."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.report import facts, heading, line

COLUMNS = ("what", "case", "unit", "predicted", "measured", "error")


@dataclass(frozen=True)
class Prediction:
    """One figure of the planner and what was found."""

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


@dataclass
class Predictions:
    """All rows of a run, and sentences that say how to read them."""

    title: str
    settings: dict[str, Any]
    rows: list[Prediction] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    load_at_start: float = field(default_factory=lambda: os.getloadavg()[0])

    def add(self, what: str, case: str, unit: str, predicted: float, measured: float) -> None:
        self.rows.append(Prediction(what, case, unit, predicted, measured))

    def summary(self) -> list[str]:
        """Of each kind of figure: rows, the median error and the largest, whatever their signs."""
        lines = []
        for what in dict.fromkeys(row.what for row in self.rows):
            errors = [abs(row.error) for row in self.rows if row.what == what]
            middle, largest = statistics.median(errors), max(errors)
            lines.append(f"{what}: {len(errors)} rows, median error {middle:.1%}, largest {largest:.1%}")
        return lines

    def publish(self, options: argparse.Namespace) -> None:
        """Print the table; write the files that were asked for."""
        found = facts(self.title, self.load_at_start)
        console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
        console.print(self._table())
        console.print("\n".join([*self.summary(), f"{found['machine']}; {found['shared']}.", *self.notes]))
        if options.json:
            rows = [asdict(row) | {"error": row.error} for row in self.rows]
            content = found | {"settings": self.settings, "summary": self.summary(), "notes": self.notes, "rows": rows}
            options.json.write_text(json.dumps(content, indent=1) + "\n")
        if options.markdown:
            lines = [*heading(found, self.settings), *[f"- {text}" for text in self.summary()], ""]
            lines += [*[f"{note}\n" for note in self.notes], line(COLUMNS), line(["---"] * 3 + ["--:"] * 3)]
            options.markdown.write_text("\n".join([*lines, *[line(row.cells()) for row in self.rows]]) + "\n")

    def _table(self) -> Table:
        table = Table(title=self.title, title_justify="left")
        for number, name in enumerate(COLUMNS):
            table.add_column(name, justify="left" if number < 3 else "right")
        for row in self.rows:
            table.add_row(*row.cells())
        return table
