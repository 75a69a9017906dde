"""All runs of an output folder as one self-contained HTML page: a table and curves for each run file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from vlmpipe.config.overrides import difference_rows, differences
from vlmpipe.inventory.listing import Inventory, ListedRun, size_text
from vlmpipe.report.load import column, read_metrics
from vlmpipe.report.pages import STYLE, page_template
from vlmpipe.report.svg_charts import PARTS, compact, lines_chart, thin_out
from vlmpipe.trainer import __version__
from vlmpipe.trainer.records.metrics import FILE as METRICS_FILE

CURVES = {"loss": "Loss, nats a label token", "validation_loss": "Validation loss, nats a label token"}
MAX_FIELDS = 8  # that differ between runs of a run file, as columns would hide the rest
OUTCOMES = {"done": "passed", "failed": "missed", "damaged": "missed"}


def build_page(inventory: Inventory, page: Path) -> str:
    """The page's HTML. `page`: the file that it is for, to which its links are relative."""
    names = list(dict.fromkeys(run.name for run in reversed(inventory.runs)))
    groups = [_group(name, [run for run in inventory.runs if run.name == name], page) for name in names]
    return page_template("vlmpipe.inventory.page", "page.html.j2").render(
        style=Markup(STYLE),
        root=inventory.root,
        groups=groups,
        num_runs=len(inventory.runs),
        problems=inventory.problems,
        outcomes=OUTCOMES,
        size=size_text,
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        version=__version__,
    )


def _group(name: str, runs: Sequence[ListedRun], page: Path) -> dict[str, object]:
    """The runs of a run file, the newest first, with what they were set otherwise."""
    drawn = [(run, read_metrics(str(run.folder))) for run in runs if (run.folder / METRICS_FILE).is_file()]
    newest = drawn[-PARTS:]
    colours = {run.run_id: number for number, (run, _) in enumerate(newest)}
    fields, left_out = _differing(runs)
    rows = [
        {
            "run": run,
            "started": f"{datetime.fromtimestamp(run.started_s):%Y-%m-%d %H:%M}" if run.started_s else "",
            "report": _link(run.folder / "report.html", page),
            "colour": colours.get(run.run_id),
            "settings": {field: values[number] for field, values in fields.items()},
        }
        for number, run in enumerate(runs)
    ]
    return {
        "name": name,
        "rows": rows[::-1],
        "fields": list(fields),
        "left_out": left_out,
        "charts": _charts(newest, runs),
        "num_trained": len(drawn),
        "num_drawn": len(newest),
    }


def _charts(
    drawn: Sequence[tuple[ListedRun, list[dict[str, object]]]], runs: Sequence[ListedRun]
) -> list[dict[str, Any]]:
    charts = []
    for metric, title in CURVES.items():
        lines = {run.run_id: thin_out(points) for run, log in drawn if (points := column(log, metric))}
        if lines:
            ends = ", ".join(f"{run_id} ends at {compact(points[-1][1])}" for run_id, points in lines.items())
            charts.append({"title": title, "svg": lines_chart(lines, label=f"{title}: {ends}", x_label="step")})
    scores = [(float(number), run.accuracy) for number, run in enumerate(runs, 1) if run.accuracy is not None]
    if len(scores) > 1:
        label = f"Exact match of {len(scores)} runs in the order of their start, the last one {compact(scores[-1][1])}"
        svg = lines_chart({"exact match": scores}, label=label, x_label="run, oldest first")
        charts.append({"title": "Exact match, share of validation questions", "svg": svg})
    return charts


def _differing(runs: Sequence[ListedRun]) -> tuple[dict[str, list[str]], int]:
    """Fields of the run file in which the runs differ, with each run's value, and how many more there are."""
    found: dict[str, list[str]] = {}
    for number, run in enumerate(runs[1:], 1):
        for field, first, this in difference_rows(differences(runs[0].settings, run.settings)):
            found.setdefault(field, [first] * len(runs))[number] = this
    return dict(list(found.items())[:MAX_FIELDS]), max(0, len(found) - MAX_FIELDS)


def _link(target: Path, page: Path) -> str:
    """The address of a file that is there, relative to the page."""
    if not target.is_file():
        return ""
    return quote(os.path.relpath(target, page.parent.resolve()).replace(os.sep, "/"))
