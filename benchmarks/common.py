"""Side-by-side timing: interleaved rounds, medians of paired ratios, checks of fairness, and reports of the figures."""

from __future__ import annotations

import argparse
import datetime
import gc
import importlib.metadata
import json
import math
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

VERSIONED = ("torch", "transformers", "accelerate", "webdataset", "numpy", "pillow", "safetensors", "tokenizers")
OUTPUT_OPTIONS = ("--json", "--markdown")
SHARED_ABOVE_LOAD = 1.5  # this process is one of the load


class UnfairError(Exception):
    """The two sides of a comparison did not do the same work, so their ratio means nothing."""


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
    def units_per_cpu_s(self) -> float:
        return self.units / self.cpu_s


@dataclass(frozen=True)
class Side:
    """One side of a claim: what it is, and its value in each round."""

    label: str
    values: Sequence[float]

    @property
    def median(self) -> float:
        return statistics.median(self.values)


@dataclass(frozen=True)
class Row:
    """One line of the report. A ratio above 1 is in favour of `ours`; without a baseline it is a plain figure."""

    claim: str
    data: str
    unit: str
    ours_label: str
    ours: float
    rounds: int
    spread: tuple[float, float]  # quartiles over the rounds: of the ratio, or of `ours` where there is no baseline
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
    load_at_start: float = field(default_factory=lambda: os.getloadavg()[0])

    def require(self, held: bool, what: str) -> None:
        """Note a condition of a fair comparison. Raises UnfairError when it did not hold."""
        if not held:
            raise UnfairError(f"not a fair comparison, for this did not hold: {what}")
        if what not in self.checks:
            self.checks.append(what)

    def compare(
        self,
        claim: str,
        data: str,
        unit: str,
        ours: Side,
        baseline: Side,
        *,
        higher_is_better: bool = False,
        wall: tuple[Sequence[float], Sequence[float]] | None = None,
    ) -> None:
        """A claim: the median over rounds of each round's own ratio, so that a slow minute weighs on both sides.

        `wall`: wall time of ours and of the baseline in each round, where it is not what the values say already.
        """
        pairs = list(zip(ours.values, baseline.values, strict=True))
        ratios = [mine / other if higher_is_better else other / mine for mine, other in pairs]
        wall_ratio = statistics.median(other / mine for mine, other in zip(*wall, strict=True)) if wall else None
        self.rows.append(
            Row(
                claim=claim,
                data=data,
                unit=unit,
                ours_label=ours.label,
                ours=ours.median,
                rounds=len(pairs),
                spread=_quartiles(ratios),
                baseline_label=baseline.label,
                baseline=baseline.median,
                ratio=statistics.median(ratios),
                wall_ratio=wall_ratio,
            )
        )

    def figure(self, claim: str, data: str, unit: str, ours: Side) -> None:
        """A plain figure, with nothing to compare it to."""
        spread = _quartiles(ours.values)
        self.rows.append(Row(claim, data, unit, ours.label, ours.median, len(ours.values), spread))

    def publish(self, options: argparse.Namespace) -> None:
        """Print the table; write the files that were asked for."""
        facts = self._facts()
        console = Console(width=None if sys.stdout.isatty() else 160)
        console.print(self._table())
        console.print(f"[dim]{facts['machine']}; {facts['shared']}. Fair because: {'; '.join(self.checks)}.[/dim]")
        if options.json:
            content = {**facts, "settings": self.settings, "checks": self.checks, "rows": [asdict(r) for r in self.rows]}
            options.json.write_text(json.dumps(content, indent=1) + "\n")
        if options.markdown:
            options.markdown.write_text(self._markdown(facts))

    def _facts(self) -> dict[str, Any]:
        load = max(self.load_at_start, os.getloadavg()[0])
        shared = f"load {load:.1f}" + (": shared with other work" if load > SHARED_ABOVE_LOAD else "")
        return {
            "title": self.title,
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "command": _command(),
            "machine": machine(),
            "shared": shared,
            "versions": {"python": platform.python_version(), **_versions(VERSIONED)},
        }

    def _table(self) -> Table:
        table = Table(title=self.title, title_justify="left")
        for name in ("claim", "data", "ours", "baseline", "unit"):
            table.add_column(name)
        for name in ("ours", "baseline", "ratio", "quartiles", "wall ratio"):
            table.add_column(name, justify="right")
        for row in self.rows:
            table.add_row(row.claim, row.data, row.ours_label, row.baseline_label, row.unit, *_numbers(row))
        return table

    def _markdown(self, facts: dict[str, Any]) -> str:
        settings = ", ".join(f"{name} {value}" for name, value in self.settings.items())
        lines = [
            f"# {self.title}",
            "",
            f"{facts['date']}, {facts['machine']}; {facts['shared']}. `{facts['command']}` ({settings}).",
            "Versions: " + ", ".join(f"{name} {version}" for name, version in facts["versions"].items()) + ".",
            "",
            "A ratio above 1 is in favour of ours. It is the median over rounds of CPU time of the process (one thread), ",
            "both sides measured in turn in one run; quartiles are those of the rounds.",
            "",
            "| claim | data | ours | baseline | unit | ours | baseline | ratio | quartiles | wall ratio |",
            "|---|---|---|---|---|--:|--:|--:|--:|--:|",
        ]
        for row in self.rows:
            texts = (row.claim, row.data, row.ours_label, row.baseline_label, row.unit, *_numbers(row))
            lines.append("| " + " | ".join(texts) + " |")
        lines += ["", "Checked in this run:", "", *[f"- {check}" for check in self.checks]]
        return "\n".join(lines) + "\n"


def clocked(work: Callable[[], float]) -> Measured:
    """Run `work`, which returns the units of work that it did."""
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    units = work()
    return Measured(time.process_time() - cpu_s, time.perf_counter() - wall_s, units)


def interleaved(sides: Mapping[str, Callable[[], Any]], rounds: int, *, warm_up: bool = True) -> dict[str, list[Any]]:
    """Run every side once a round, in turn and in turned order, so that drift of the machine does not favour one."""
    results: dict[str, list[Any]] = {name: [] for name in sides}
    order = list(sides)
    for number in range(-1 if warm_up else 0, rounds):
        for name in order if number % 2 else reversed(order):
            gc.enable()  # the training loop turns it off for good
            gc.collect()
            result = sides[name]()
            if number >= 0:
                results[name].append(result)
    return results


def close(left: Iterable[float], right: Iterable[float], tolerance: float) -> bool:
    """Whether two series of losses are equal within a relative tolerance."""
    return all(math.isclose(a, b, rel_tol=tolerance) for a, b in zip(left, right, strict=True))


def options(description: str | None) -> argparse.Namespace:
    """The command line of a benchmark."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="a short form that shows that it works; not for figures")
    parser.add_argument("--rounds", type=int, help="rounds of each comparison")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything as JSON")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table as Markdown")
    return parser.parse_args()


def machine() -> str:
    """The machine in neutral words: cores and kind of processor."""
    info = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: (.+)$", info.read_text(), re.MULTILINE) if info.exists() else []
    name = re.sub(r"\(R\)|\(TM\)|CPU|Processor|@.*", "", names[0] if names else platform.processor() or "processor")
    return f"{os.cpu_count()} cores of an {' '.join(name.split())}, {platform.system()}"


def _numbers(row: Row) -> tuple[str, str, str, str, str]:
    low, high = row.spread
    baseline, ratio = (f"{row.baseline:.4g}", f"{row.ratio:.2f}") if row.baseline and row.ratio else ("", "")
    spread = f"{low:.2f}–{high:.2f}" if row.ratio else f"{low:.3g}–{high:.3g}"
    return f"{row.ours:.4g}", baseline, ratio, spread, f"{row.wall_ratio:.2f}" if row.wall_ratio else ""


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    low, high = np.percentile(values, [25, 75])
    return float(low), float(high)


def _versions(names: Sequence[str]) -> dict[str, str]:
    installed = {package.metadata["Name"] for package in importlib.metadata.distributions()}
    return {name: importlib.metadata.version(name) for name in names if name in installed}


def _command() -> str:
    """The command as a reader can repeat it: without where this run wrote its files."""
    given, kept = iter(sys.argv[1:]), []
    for argument in given:
        if argument in OUTPUT_OPTIONS:
            next(given)
        elif not argument.startswith(tuple(f"{option}=" for option in OUTPUT_OPTIONS)):
            kept.append(argument)
    return " ".join(["python -m", f"benchmarks.{Path(sys.argv[0]).stem}", *kept])
