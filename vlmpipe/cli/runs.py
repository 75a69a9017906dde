"""`vlmpipe status`, `cancel`, `logs`, `diagnose` and `compare`, for runs on this machine, on Vertex AI and on Kubeflow.

RUN is looked for on this machine, then among runs submitted from this folder, then on Vertex AI or, by a link, on
Kubeflow.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from vlmpipe.cli.arguments import AsJson, FailOnReject, run_ids
from vlmpipe.cli.output import doing, print_json, print_lines, to_stderr
from vlmpipe.trainer.errors import ConfigError, ExitCode, UserError, os_errors

if TYPE_CHECKING:
    from vlmpipe.pipelines.tune.status import SearchStatus
    from vlmpipe.runs.kubeflow.names import KubeflowRun
    from vlmpipe.runs.kubeflow.status import KubeflowStatus
    from vlmpipe.runs.local.summary import RunReport
    from vlmpipe.runs.vertex.custom_job import JobStatus
    from vlmpipe.runs.vertex.names import Address
    from vlmpipe.runs.vertex.status import VertexStatus

    AnyStatus = RunReport | SearchStatus | JobStatus | VertexStatus | KubeflowStatus

RUN_HELP = (
    "Run id, its beginning, @last or @last:NAME; folder, pipeline job or custom job, its resource name or its link to "
    "the console or to Kubeflow's page; or a search."
)
Run = Annotated[str, typer.Argument(metavar="RUN", help=RUN_HELP, autocompletion=run_ids)]
Root = Annotated[str, typer.Option(help="The local runs' output.root_uri.")]
Project = Annotated[
    str,
    typer.Option(envvar="VERTEX_PROJECT_ID", help="Google Cloud project of a run on Vertex AI.", show_default=False),
]
Location = Annotated[
    str, typer.Option(envvar="VERTEX_LOCATION", help="Region of a run on Vertex AI.", show_default=False)
]
Plain = Annotated[bool, typer.Option("--plain", help="Print lines instead of a live table.")]


def status(
    run: Annotated[
        str,
        typer.Argument(metavar="[RUN]", help=f"{RUN_HELP} Without it, all runs.", autocompletion=run_ids),
    ] = "",
    root: Root = "runs",
    project: Project = "",
    location: Location = "",
    watching: Annotated[
        bool, typer.Option("--watch", help="Follow the run to its end, and leave with its exit code.")
    ] = False,
    deep: Annotated[
        bool, typer.Option("--deep", help="Also compare all files of a local run with their checksums (exit 65).")
    ] = False,
    plain: Plain = False,
    as_json: AsJson = False,
    fail_on_reject: FailOnReject = False,
) -> None:
    """Show the runs of this folder, or the status of one."""
    if not run:
        _list_runs(root, as_json)
        return
    with doing(f"looking for run {run}"):
        from vlmpipe.pipelines.find import reader_of

        read, on_service = reader_of(run, root=root, project=project, location=location)
    if deep:
        _check_files(run, root, as_json)
        return
    if watching:
        found = watch_and_show(
            run, read, on_service=on_service, plain=plain, as_json=as_json, fail_on_reject=fail_on_reject
        )
        leave(found, fail_on_reject)
    if fail_on_reject:
        raise ConfigError("--fail-on-reject is given without --watch", fix="add --watch, or leave it out")
    with doing(f"asking {'its service' if on_service else 'its records'} for the status of run {run}"):
        found = read()
    show(found, as_json)


def _check_files(run: str, root: str, as_json: bool) -> None:
    from vlmpipe.runs.file_check import check_files
    from vlmpipe.runs.local.summary import find_run
    from vlmpipe.runs.short_names import full_name
    from vlmpipe.trainer.errors import DataError

    checks = []
    for check in check_files(str(find_run(root, full_name(run, root)).folder)):
        checks.append(check)
        if not as_json:
            print_lines([check.line()])
    if as_json:
        is_whole = not any(check.problem for check in checks)
        print_json({"ok": is_whole, "checks": [check.as_json() for check in checks]})
    if damaged := [check for check in checks if check.problem]:
        raise DataError(
            f"{damaged[0].part}: {damaged[0].problem}",
            expected="the bytes that the run wrote",
            fix="run the run file again: each step checks the files that it reuses, and replaces damaged ones",
        )


def cancel(
    run: Run, root: Root = "runs", project: Project = "", location: Location = "", as_json: AsJson = False
) -> None:
    """Ask a run to stop. Saved checkpoints stay; the same command or --run-id continues it."""
    from vlmpipe.pipelines.find import find
    from vlmpipe.pipelines.tune.status import find_search
    from vlmpipe.runs.kubeflow.names import KubeflowRun
    from vlmpipe.runs.local import control as local_control
    from vlmpipe.runs.short_names import full_name
    from vlmpipe.runs.vertex.names import Address

    run = full_name(run, root)
    search = find_search(run, root)
    found = None if search else find(run, root=root, project=project, location=location)
    if search:
        name, asked = search.name, search.cancel()
    elif isinstance(found, Address):
        from vlmpipe.runs.vertex.client import Runs
        from vlmpipe.runs.vertex.custom_job import CustomJobs

        with doing(f"asking Vertex AI to cancel run {run}"):
            jobs: CustomJobs | Runs = CustomJobs(found.place) if found.is_custom_job else Runs(found.place)
            name, asked = found.argument, jobs.cancel(found)
    elif isinstance(found, KubeflowRun):
        from vlmpipe.runs.kubeflow.client import KubeflowRuns

        with doing(f"asking Kubeflow to cancel run {run}"):
            name, asked = found.argument, KubeflowRuns(found.endpoint, found.namespace).cancel(found)
    else:
        assert found
        name, asked = found.folder.name, local_control.cancel(found)
    if as_json:
        print_json({"run_id": name, "asked": asked})
        return
    said = "asked to stop" if asked else "stopping already, or stopped"
    print_lines([f"run {name}: {said}", f"  to see it end: vlmpipe status {name} --watch"])


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
    from vlmpipe.runs.kubeflow.names import KubeflowRun
    from vlmpipe.runs.vertex.names import Address

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


def diagnose(
    run: Run, root: Root = "runs", project: Project = "", location: Location = "", as_json: AsJson = False
) -> None:
    """Say why a run failed or stopped, and what to do. From its records, logs, exit codes and stacks."""
    from vlmpipe.pipelines.find import find
    from vlmpipe.runs.kubeflow.names import KubeflowRun
    from vlmpipe.runs.local import diagnose as local
    from vlmpipe.runs.vertex.names import Address

    with doing(f"reading the records and logs of run {run}"):
        run_at = None if local.is_run_folder(run) else find(run, root=root, project=project, location=location)
        if isinstance(run_at, Address) and run_at.is_custom_job:
            raise ConfigError(
                f"{run} is a custom job without a pipeline",
                expected="a run of the whole pipeline, whose steps leave records",
                fix=f"vlmpipe status {run}, vlmpipe logs {run}",
            )
        if isinstance(run_at, Address):
            from vlmpipe.runs.vertex.diagnose import diagnose_vertex

            found = diagnose_vertex(run_at)
        elif isinstance(run_at, KubeflowRun):
            from vlmpipe.runs.kubeflow.diagnose import diagnose_kubeflow

            found = diagnose_kubeflow(run_at)
        else:
            found = local.diagnose_folder(run_at.folder if run_at else Path(run))
    print_json(found.as_json()) if as_json else print_lines(found.lines())


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
        typer.Option("--html", metavar="FILE", help="Also write a page, with pictures.", show_default=False),
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
    with doing(f"comparing {', '.join(runs)}"):
        from vlmpipe.compare.compare import compare as compared
        from vlmpipe.compare.sides import read_sides

        found = compared(read_sides(runs, root))
    written = []
    if html:
        from vlmpipe.compare.page import build_page

        with os_errors(f"writing {html}"):
            html.write_text(build_page(found), encoding="utf-8")
        written.append(f"page         {html}")
    if predictions:
        from vlmpipe.compare.predictions import write_predictions

        written.append(f"predictions  {predictions}, {write_predictions(found, predictions):,} rows")
    if as_json:
        print_json(found.as_json())
        return
    from vlmpipe.cli.views.comparison import print_comparison

    print_comparison(found)
    if written:
        print_lines(["", *written])


def watch_and_show(
    run: str,
    read: Callable[[], AnyStatus],
    *,
    on_service: bool,
    plain: bool,
    as_json: bool,
    fail_on_reject: bool = False,
) -> AnyStatus:
    """Follow a run to its end and show how it ended."""
    found = follow(run, read, on_service=on_service, plain=plain or as_json, say=to_stderr if as_json else print)
    show_end(found, as_json=as_json, fail_on_reject=fail_on_reject)
    return found


def show_end(found: AnyStatus, *, as_json: bool, fail_on_reject: bool) -> None:
    """Print how a run ended: as JSON with the exit code that `leave` ends this command with."""
    if as_json:
        code = ExitCode.REJECTED if _is_rejected(found, fail_on_reject) else found.exit_code
        print_json({**found.as_json(), "exit_code": code})
    else:
        print_lines(["", *found.lines()])


def follow(
    run: str, read: Callable[[], AnyStatus], *, on_service: bool, plain: bool, say: Callable[[str], None] = to_stderr
) -> AnyStatus:
    """Follow a run to its end."""
    from vlmpipe.runs.live_view import view_for
    from vlmpipe.runs.watch import LOCAL_POLL_S, SERVICE_POLL_S, watch

    view = view_for(plain=plain, say=say)
    return watch(run, read, view, every_s=SERVICE_POLL_S if on_service else LOCAL_POLL_S)


def leave(found: AnyStatus, fail_on_reject: bool) -> NoReturn:
    """End with the run's exit code. Raises UserError (76) for a rejected model where `fail_on_reject`."""
    if _is_rejected(found, fail_on_reject):
        raise UserError(
            f"the gate rejected the model. {found.as_json()['decision'].get('reason', '')}",
            expected="an accepted model, because --fail-on-reject is given",
            fix="train for longer or on other data, or change the gate section of the run file",
            code=ExitCode.REJECTED,
        )
    raise typer.Exit(found.exit_code or 0)


def _is_rejected(found: AnyStatus, fail_on_reject: bool) -> bool:
    decision = found.as_json().get("decision") or {}
    return fail_on_reject and not found.exit_code and decision.get("accepted") is False


def show(found: AnyStatus, as_json: bool) -> None:
    """Print the status of a run."""
    if as_json:
        print_json(found.as_json())
        return
    from vlmpipe.cli.views.tables import print_state
    from vlmpipe.pipelines.tune.status import SearchStatus

    if isinstance(found, SearchStatus):  # its lines are the table
        print_lines(found.lines())
        return
    print_state(found.state)
    print_lines(["", *found.lines()])


def _local_logs(folder: Path, step: str, last: int, follow: bool) -> Iterator[tuple[str, dict[str, str | None]]]:
    from vlmpipe.runs.local.control import follow_logs, log_files, read_logs

    files = log_files(folder, step)
    lines = follow_logs(folder, files, step=step, last=last) if follow else read_logs(files, step=step, last=last)
    for line in lines:
        prefix = f"[{line.process}] " if len(files) > 1 else ""
        yield prefix + line.text, _log_fields(line.time, line.step, line.process, line.text)


def _log_fields(time: str, step: str, process: str, text: str) -> dict[str, str | None]:
    return {"time": time or None, "step": step or None, "process": process, "text": text}


def _vertex_logs(address: Address, step: str, last: int, follow: bool) -> Iterator[tuple[str, dict[str, str | None]]]:
    from vlmpipe.runs.vertex.custom_job import log_source
    from vlmpipe.runs.vertex.logs import Follower, require_jobs
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
    from vlmpipe.runs.kubeflow.client import OVER, KubeflowRuns
    from vlmpipe.runs.kubeflow.logs import PodLogs
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


def _list_runs(root: str, as_json: bool) -> None:
    from vlmpipe.cli.views import tables
    from vlmpipe.runs.local.summary import list_runs
    from vlmpipe.runs.submitted import run_records

    runs, submitted = list_runs(root), run_records()
    if as_json:
        elsewhere = [{"run_id": name, **vars(note)} for name, note in submitted.items()]
        print_json({"runs": [one.as_dict() for one in runs], "submitted": elsewhere})
        return
    tables.print_runs(runs, root)
    if submitted:
        tables.print_submitted(submitted)


ALL = (status, cancel, logs, diagnose, compare)
