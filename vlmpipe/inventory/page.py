"""All runs of an output folder as one self-contained HTML page: a table and curves for each run file."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote

from markupsafe import Markup

from vlmpipe.inventory.listing import Listing
from vlmpipe.inventory.run_folder import SETTINGS, ListedRun, size_text
from vlmpipe.report.load import column, read_metrics
from vlmpipe.report.pages import STYLE, page_template
from vlmpipe.report.svg_charts import PARTS, compact, lines_chart, thin_out
from vlmpipe.runs.folders.stages import RUN_FILE_COPY
from vlmpipe.runs.setting_differences import difference_rows, differences
from vlmpipe.trainer import __version__
from vlmpipe.trainer.errors import DataError
from vlmpipe.trainer.records.metrics import FILE as METRICS_FILE
from vlmpipe.trainer.storage.records import read_record_file

CURVES = {"loss": "Loss, nats a label token", "validation_loss": "Validation loss, nats a label token"}
MAX_FIELDS = 8  # that differ between runs of a run file, as columns would hide the rest
OUTCOMES = {"done": "passed", "failed": "missed", "damaged": "missed"}


def build_page(listing: Listing, page: Path) -> str:
    """The page's HTML. `page`: the file that it is for, to which its links are relative."""
    names = list(dict.fromkeys(run.name for run in reversed(listing.runs)))
    groups = [_group(name, [run for run in listing.runs if run.name == name], page) for name in names]
    return page_template("vlmpipe.inventory.page", "page.html.j2").render(
        style=Markup(STYLE),
        root=listing.root,
        groups=groups,
        num_runs=listing.num_runs,
        left_out=listing.left_out,
        problems=listing.problems,
        outcomes=OUTCOMES,
        size=size_text,
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        version=__version__,
    )


def _group(name: str, runs: Sequence[ListedRun], page: Path) -> dict[str, object]:
    """The runs of a run file, the newest first, with the settings in which they differ."""
    drawn = [run for run in runs if (run.folder / METRICS_FILE).is_file()]
    newest = [(run, read_metrics(str(run.folder))) for run in drawn[-PARTS:]]
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
) -> list[dict[str, str]]:
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
    values: dict[str, list[str]] = {}
    settings = [_settings(run) for run in runs]
    for number, changed in enumerate(settings[1:], 1):
        for field, first, this in difference_rows(differences(settings[0], changed)):
            values.setdefault(field, [first] * len(runs))[number] = this
    return dict(list(values.items())[:MAX_FIELDS]), max(0, len(values) - MAX_FIELDS)


def _settings(run: ListedRun) -> dict[str, object]:
    """The run file; of a search the settings of its base. Empty for a damaged run, whose row says what is wrong."""
    with contextlib.suppress(DataError):
        return read_record_file(run.folder / RUN_FILE_COPY) or read_record_file(run.folder / SETTINGS)
    return {}


def _link(target: Path, page: Path) -> str:
    """The address of a file that is there, relative to the page."""
    if not target.is_file():
        return ""
    return quote(os.path.relpath(target, page.parent.resolve()).replace(os.sep, "/"))
