"""`vlmpipe logs`, for runs on this machine, on Vertex AI and on Kubeflow."""

from __future__ import annotations

import contextlib
import json
from typing import Annotated

import typer

from vlmpipe.cli.output import doing
from vlmpipe.cli.runs.options import Location, Project, Root, Run


def logs(
    run: Run,
    root: Root = "runs",
    project: Project = "",
    location: Location = "",
    step: Annotated[
        str, typer.Option(help="Only this step's, for example train; of a stage, align-train.", show_default=False)
    ] = "",
    last: Annotated[int, typer.Option("--last", min=0, metavar="N", help="Lines from the end; 0 for all.")] = 200,
    follow: Annotated[bool, typer.Option("--follow", help="Continue until the run is over.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object a line: time (null if unknown), step, process, text.")
    ] = False,
) -> None:
    """Print the lines of a run. The pipeline and its steps, or the replicas of one job."""
    from vlmpipe.platforms.find import find

    located = find(run, root=root, project=project, location=location)
    waiting = f"asking {located.asks_for_logs} for the logs of run {located.argument}"
    with doing(waiting) if located.asks_for_logs else contextlib.nullcontext():
        lines = located.logs(step=step, last=last, follow=follow)
    try:
        for line in lines:
            print(json.dumps(line.as_json(), ensure_ascii=False) if as_json else line.shown, flush=follow)
    except KeyboardInterrupt:
        raise typer.Exit(0) from None
