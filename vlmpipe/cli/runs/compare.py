"""`vlmpipe compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vlmpipe.cli.arguments import AsJson, run_ids
from vlmpipe.cli.output import doing, print_json, print_lines
from vlmpipe.cli.runs.options import Root
from vlmpipe.trainer.errors import os_errors
from vlmpipe.trainer.gc_control import collector_off


def compare(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...",
            help="Two or more evaluated runs: ids, folders, gs:// addresses, or MODEL@ALIAS or MODEL@VERSION of the "
            "registry. All are compared with the first.",
            autocompletion=run_ids,
        ),
    ],
    root: Root = "runs",
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Also write a page, with images.", show_default=False),
    ] = None,
    predictions: Annotated[
        Path | None,
        typer.Option(
            "--predictions",
            metavar="FILE",
            help="Also write all answers: .parquet, or .jsonl for Vertex AI's evaluation service.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare evaluated runs. Scores by slice with the paired bootstrap, disagreements, time, cost and tokens."""
    with collector_off(), doing(f"comparing {', '.join(runs)}"):  # half of it is loading modules, which all stay
        from vlmpipe.comparison.compare import compare as compared
        from vlmpipe.comparison.sides import read_sides

        comparison = compared(read_sides(runs, root))
    written = []
    if html:
        from vlmpipe.comparison.page import build_page

        with os_errors(f"writing {html}"):
            html.write_text(build_page(comparison), encoding="utf-8")
        written.append(f"page         {html}")
    if predictions:
        from vlmpipe.comparison.predictions import write_predictions

        written.append(f"predictions  {predictions}, {write_predictions(comparison, predictions):,} rows")
    if as_json:
        print_json(comparison.as_json())
        return
    from vlmpipe.cli.views.comparison import print_comparison

    print_comparison(comparison)
    if written:
        print_lines(["", *written])
