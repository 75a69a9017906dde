"""`vlmpipe logs`, for runs on this machine, on Vertex AI and on Kubeflow."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vlmpipe.cli.output import doing
from vlmpipe.cli.runs.options import Location, Project, Root, Run

if TYPE_CHECKING:
    from vlmpipe.platforms.kubeflow.runs.names import KubeflowRun
    from vlmpipe.platforms.vertex.runs.names import Address


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
    """Print what a run has printed. The pipeline and its steps, or the replicas of one job."""
    from vlmpipe.pipelines.find import find
    from vlmpipe.platforms.kubeflow.runs.names import KubeflowRun
    from vlmpipe.platforms.vertex.runs.names import Address

    found = find(run, root=root, project=project, location=location)
    if isinstance(found, Address):
        lines = _vertex_logs(found, step, last, follow)
    elif isinstance(found, KubeflowRun):
        lines = _kubeflow_logs(found, step, last, follow)
    else:
        lines = _local_logs(found.folder, step, last, follow)
    try:
        for text, fields in lines:
            print(json.dumps(fields, ensure_ascii=False) if as_json else text, flush=follow)
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


def _local_logs(folder: Path, step: str, last: int, follow: bool) -> Iterator[tuple[str, dict[str, str | None]]]:
    from vlmpipe.platforms.local.runs.control import follow_logs, log_files, read_logs

    files = log_files(folder, step)
    lines = follow_logs(folder, files, step=step, last=last) if follow else read_logs(files, step=step, last=last)
    for line in lines:
        prefix = f"[{line.process}] " if len(files) > 1 else ""
        yield prefix + line.text, _log_fields(line.time, line.step, line.process, line.text)


def _log_fields(time: str, step: str, process: str, text: str) -> dict[str, str | None]:
    return {"time": time or None, "step": step or None, "process": process, "text": text}


def _vertex_logs(address: Address, step: str, last: int, follow: bool) -> Iterator[tuple[str, dict[str, str | None]]]:
    from vlmpipe.platforms.vertex.runs.custom_job import log_source
    from vlmpipe.platforms.vertex.runs.logs import Follower, require_jobs
    from vlmpipe.runs.watch import SERVICE_POLL_S

    follower, source = Follower(last), log_source(address, step)
    with doing(f"asking Vertex AI for the logs of run {address.argument}"):
        numbers, is_over = source()
    if not follow:
        require_jobs(numbers, step, address.argument)
    while True:
        for entry in follower.read(address.place, numbers):
            yield entry.line(), _log_fields(entry.moment, entry.step, entry.replica, entry.text)
        if not follow or is_over:
            return
        time.sleep(SERVICE_POLL_S)
        numbers, is_over = source()


def _kubeflow_logs(run: KubeflowRun, step: str, last: int, follow: bool) -> Iterator[tuple[str, dict[str, str | None]]]:
    from vlmpipe.platforms.kubeflow.runs.client import OVER, KubeflowRuns
    from vlmpipe.platforms.kubeflow.runs.logs import PodLogs
    from vlmpipe.runs.watch import SERVICE_POLL_S

    with doing(f"asking Kubernetes for the logs of run {run.argument}"):
        runs, pods = KubeflowRuns(run.endpoint, run.namespace), PodLogs(run)
    while True:
        found = runs.get(run)
        for line in pods.read(found, step=step, last=last):
            yield line.line(), _log_fields(line.time, line.step, line.pod, line.text)
        if not follow or found.state in OVER:
            return
        last = 0
        time.sleep(SERVICE_POLL_S)
