"""The figures of a benchmark run, as a table, JSON and Markdown, with what is needed to judge and repeat them."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import re
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.common import Measured

VERSIONED = ("torch", "transformers", "accelerate", "webdataset", "numpy", "pillow", "safetensors", "tokenizers")
OUTPUT_OPTIONS = ("--json", "--markdown")
SHARED_ABOVE_LOAD = 1.5  # this process is one of the load
COLUMNS = ("claim", "data", "ours", "baseline", "unit", "ours", "baseline", "ratio", "quartiles", "wall ratio")
HOW_TO_READ = (
    "A ratio above 1 is in favour of ours. CPU time is that of the process, one thread. Both sides were measured in "
    "turn, and a ratio is the median of the rounds' own ratios. A line without a baseline is a plain figure."
)


class UnfairError(Exception):
    """The two sides of a comparison did not do the same work, so their ratio means nothing."""


@dataclass(frozen=True)
class Side:
    """One side of a claim: what it is, and its value in each round."""

    label: str
    values: Sequence[float]


@dataclass(frozen=True)
class Row:
    """One line of the report."""

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


@dataclass
class Report:
    """The figures of one benchmark run and the checks that make them comparable."""

    title: str
    settings: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    checks: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # how to read some of the rows
    load_at_start: float = field(default_factory=lambda: os.getloadavg()[0])

    def require(self, held: bool, what: str, *, found: str = "") -> None:
        """Note a condition of a fair comparison. Raises UnfairError, with what was found, when it did not hold."""
        if not held:
            said = f" ({found})" if found else ""
            raise UnfairError(f"this must hold for a fair comparison, and does not: {what}{said}")
        if what not in self.checks:
            self.checks.append(what)

    def compare(
        self, claim: str, data: str, unit: str, ours: Side, baseline: Side, *, wall_ratio: float | None = None
    ) -> None:
        """A claim about values of which more is better.

        The ratio is the median of the rounds' own ratios, so that a slow minute weighs on both sides.
        """
        ratios = [mine / other for mine, other in zip(ours.values, baseline.values, strict=True)]
        self.rows.append(
            Row(
                claim=claim,
                data=data,
                unit=unit,
                ours_label=ours.label,
                ours=statistics.median(ours.values),
                rounds=len(ratios),
                quartiles=_quartiles(ratios),
                baseline_label=baseline.label,
                baseline=statistics.median(baseline.values),
                ratio=statistics.median(ratios),
                wall_ratio=wall_ratio,
            )
        )

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

    def publish(self, options: argparse.Namespace) -> None:
        """Print the table; write the files that were asked for."""
        found = facts(self.title, self.load_at_start)
        console = Console(width=None if sys.stdout.isatty() else 200)
        console.print(self._table())
        console.print(f"{found['machine']}; {found['shared']}. {HOW_TO_READ}")
        for note in self.notes:
            console.print(note)
        console.print("Checked: " + "; ".join(self.checks) + ".")
        if options.json:
            content = found | {"settings": self.settings, "checks": self.checks, "notes": self.notes}
            options.json.write_text(json.dumps(content | {"rows": [asdict(row) for row in self.rows]}, indent=1) + "\n")
        if options.markdown:
            options.markdown.write_text(self._markdown(found))

    def _table(self) -> Table:
        table = Table(title=self.title, title_justify="left")
        for number, name in enumerate(COLUMNS):
            table.add_column(name, justify="left" if number < 5 else "right")
        for row in self.rows:
            table.add_row(*_cells(row))
        return table

    def _markdown(self, found: dict[str, Any]) -> str:
        lines = [*heading(found, self.settings), HOW_TO_READ, "", *[f"{note}\n" for note in self.notes]]
        lines += [line(COLUMNS), line(["---"] * 5 + ["--:"] * 5), *[line(_cells(row)) for row in self.rows]]
        lines += ["", "Checked in this run:", "", *[f"- {check}" for check in self.checks]]
        return "\n".join(lines) + "\n"


def facts(title: str, load_at_start: float) -> dict[str, Any]:
    """What is needed to judge figures and to repeat them."""
    load = max(load_at_start, os.getloadavg()[0])
    return {
        "title": title,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": _command(),
        "machine": machine(),
        "shared": f"load {load:.1f}" + (", shared with other work" if load > SHARED_ABOVE_LOAD else ""),
        "versions": {"python": platform.python_version(), **_versions()},
    }


def heading(found: dict[str, Any], settings: dict[str, Any]) -> list[str]:
    """The first lines of a Markdown file with figures."""
    said = ", ".join(f"{name} {value}" for name, value in settings.items())
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    lines = [f"# {found['title']}", "", f"{found['date']}. {found['machine']}; {found['shared']}.", ""]
    return [*lines, f"`{found['command']}` ({said}). Versions: {versions}.", ""]


def machine() -> str:
    """The machine in neutral words: cores and kind of processor."""
    info = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: (.+)$", info.read_text(), re.MULTILINE) if info.exists() else []
    name = re.sub(r"\(R\)|\(TM\)|CPU|Processor|@.*", "", names[0] if names else platform.machine())
    return f"{os.cpu_count()} cores of an {' '.join(name.split())}, {platform.system()}"


def _cells(row: Row) -> list[str]:
    low, high = row.quartiles
    numbers = [f"{row.ours:.4g}", "", "", f"{low:.3g}–{high:.3g}", ""]
    if row.baseline is not None and row.ratio is not None:
        numbers[1:4] = [f"{row.baseline:.4g}", f"{row.ratio:.2f}", f"{low:.2f}–{high:.2f}"]
    if row.wall_ratio is not None:
        numbers[4] = f"{row.wall_ratio:.2f}"
    return [row.claim, row.data, row.ours_label, row.baseline_label, row.unit, *numbers]


def line(cells: Sequence[str]) -> str:
    """A line of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    low, high = np.percentile(values, [25, 75])
    return float(low), float(high)


def _versions() -> dict[str, str]:
    found = {package.metadata["Name"].lower(): package.version for package in importlib.metadata.distributions()}
    return {name: found[name] for name in VERSIONED if name in found}


def _command() -> str:
    """The command as a reader can repeat it: without where this run wrote its files."""
    given, kept = iter(sys.argv[1:]), []
    for argument in given:
        if argument in OUTPUT_OPTIONS:
            next(given)
        elif not argument.startswith(tuple(f"{option}=" for option in OUTPUT_OPTIONS)):
            kept.append(argument)
    return " ".join([f"python -m benchmarks.{Path(sys.argv[0]).stem}", *kept])
