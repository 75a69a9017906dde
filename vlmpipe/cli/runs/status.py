"""`vlmpipe status`, `cancel` and `diagnose`, for runs on this machine, on Vertex AI and on Kubeflow."""

from __future__ import annotations

import contextlib
from typing import Annotated

import typer

from vlmpipe.cli.arguments import AsJson, FailOnReject, run_ids
from vlmpipe.cli.output import doing, print_json, print_lines
from vlmpipe.cli.runs.options import RUN_HELP, Location, Plain, Project, Root, Run
from vlmpipe.cli.runs.watching import leave, show, watch_and_show
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.storage.outage import answering_soon


def status(
    run: Annotated[
        str,
        typer.Argument(
            metavar="[RUN]", help=f"{RUN_HELP} Default the newest.", autocompletion=run_ids, show_default=False
        ),
    ] = "@last",
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
    """Show the status of a run: its steps, its results or what failed."""
    with doing(f"looking for run {run}"), answering_soon():
        from vlmpipe.platforms.find import reader_of

        read, on_service = reader_of(run, root=root, project=project, location=location)
    if deep:
        _check_files(run, root, as_json)
        return
    if watching:
        result = watch_and_show(
            run, read, on_service=on_service, plain=plain, as_json=as_json, fail_on_reject=fail_on_reject
        )
        leave(result, fail_on_reject)
    if fail_on_reject:
        raise ConfigError("--fail-on-reject is given without --watch", fix="add --watch, or leave it out")
    asked = "its service" if on_service else "its records"
    with doing(f"asking {asked} for the status of run {run}"), answering_soon():
        result = read()
    show(result, as_json)


def _check_files(run: str, root: str, as_json: bool) -> None:
    from vlmpipe.platforms.short_names import full_name
    from vlmpipe.runs.folders.file_check import check_files
    from vlmpipe.runs.folders.summary import find_run
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
    from vlmpipe.platforms.find import find, find_search
    from vlmpipe.platforms.short_names import full_name

    run = full_name(run, root)
    if search := find_search(run, root):
        name, asked = search.name, search.cancel()
    else:
        located = find(run, root=root, project=project, location=location)
        with doing(f"asking {located.asks} to cancel run {run}") if located.asks else contextlib.nullcontext():
            name, asked = located.argument, located.cancel()
    if as_json:
        print_json({"run_id": name, "asked": asked})
        return
    state = "asked to stop" if asked else "stopping already, or stopped"
    print_lines([f"run {name}: {state}", f"  follow: vlmpipe status {name} --watch"])


def diagnose(
    run: Run, root: Root = "runs", project: Project = "", location: Location = "", as_json: AsJson = False
) -> None:
    """Say why a run failed or stopped, and what to do. From its records, logs, exit codes and stacks."""
    from vlmpipe.platforms.find import find_to_diagnose

    with doing(f"reading the records and logs of run {run}"), answering_soon():
        diagnosis = find_to_diagnose(run, root=root, project=project, location=location).diagnose()
    print_json(diagnosis.as_json()) if as_json else print_lines(diagnosis.lines())
