"""`vlmpipe run` and `submit`: start a run, here, on Vertex AI or on Kubeflow."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vlmpipe import api
from vlmpipe.cli.arguments import (
    AsJson,
    FailOnReject,
    OptionalSource,
    Overrides,
    RunFile,
    load,
    load_source,
    service_target,
)
from vlmpipe.cli.output import doing, print_json, print_lines, to_stderr
from vlmpipe.cli.runs.options import Location, Plain, Project
from vlmpipe.cli.runs.submission import SubmitOptions, submit_and_print
from vlmpipe.cli.runs.watching import follow, leave, show_end, watch_and_show
from vlmpipe.platforms.table import DEFAULT, platform_of
from vlmpipe.trainer.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vlmpipe.pipelines.submit_job import SubmittedJob
    from vlmpipe.pipelines.submit_probe import SubmittedProbe


class OnlyOption(StrEnum):
    """Jobs that can run without a pipeline."""

    train = "train"
    probe = "probe"


def run(
    config: RunFile,
    overrides: Overrides = None,
    run_id: Annotated[
        str,
        typer.Option(
            help="Name of the run, or of one to continue, also with changed settings: @last is this run file's newest, "
            "@last:NAME another's. Default <name>-<date>-<time>.",
            show_default=False,
        ),
    ] = "",
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start a new run even if the last one can be continued.")
    ] = False,
    retries: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help="How often each replica of a job is started again when it fails without a named cause; default 0, "
            "with --inject-fault as often as on Vertex AI.",
            show_default=False,
        ),
    ] = None,
    faults: Annotated[
        list[str] | None,
        typer.Option(
            "--inject-fault",
            metavar="EVENT",
            help="Inject a fault into training: preempt:node=1,after_step=20,notice=5s, kill:rank=0,after_step=7, "
            "kill:node=..., stop:node=1,after_step=3,for=2s or random:seed=7,every_steps=15,count=4. Repeatable.",
            show_default=False,
        ),
    ] = None,
    plain: Plain = False,
    as_json: AsJson = False,
    fail_on_reject: FailOnReject = False,
) -> None:
    """Run the whole pipeline on this machine. A last run of the same run file that did not finish is continued.

    vlmpipe submit starts a run on Vertex AI or Kubeflow.
    """
    from vlmpipe.runs.live_view import view_for

    say = to_stderr if as_json else print
    result = api.run(
        load(config, overrides),
        run_id=run_id,
        fresh=fresh,
        retries=retries,
        inject_faults=faults or (),
        view=view_for(plain=plain or as_json, say=say),
        say=say,
        raise_on_failure=False,
    )
    show_end(result, as_json=as_json, fail_on_reject=fail_on_reject)
    leave(result, fail_on_reject)


def submit(
    config: OptionalSource = "",
    overrides: Overrides = None,
    target: Annotated[str, service_target("Where to start it.")] = DEFAULT,
    force: Annotated[
        bool,
        typer.Option("--force", help="Submit even if the plan does not fit, and without checking buckets."),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask, whatever it costs.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be sent, and send nothing.")] = False,
    run_id: Annotated[
        str,
        typer.Option(
            help="An earlier run to continue, by its id, @last (this run file's newest on this service) or @last:NAME; "
            "default a new one.",
            show_default=False,
        ),
    ] = "",
    detach: Annotated[bool, typer.Option("--detach", help="Leave once it is started, and do not watch it.")] = False,
    plain: Plain = False,
    as_json: AsJson = False,
    fail_on_reject: FailOnReject = False,
    only: Annotated[
        OnlyOption | None,
        typer.Option(
            help="Without a pipeline: train starts the training job alone, on data that is prepared; probe tries each "
            "machine of the run for three minutes and prints what it measured next to the plan.",
            show_default=False,
        ),
    ] = None,
    job_spec: Annotated[
        Path | None,
        typer.Option("--job-spec", metavar="FILE", help="Start the custom job of this spec instead of a run file's."),
    ] = None,
    project: Project = "",
    location: Location = "",
) -> None:
    """Start a run on Vertex AI or Kubeflow and watch it. Plans, compiles, asks before much is spent, and sends it."""
    if bool(config) == bool(job_spec) or (job_spec and only):
        arguments = f"{config or 'no run file'}, {'--job-spec' if job_spec else 'no --job-spec'}"
        raise ConfigError(
            f"found {arguments}{', --only' if only else ''}",
            expected="vlmpipe submit CONFIG [--only train|probe], or vlmpipe submit --job-spec FILE",
        )
    platform = platform_of(target)
    if (job_spec or only) and not platform.takes_jobs:
        option = "--job-spec" if job_spec else "--only"
        raise ConfigError(f"{option} is given with --target {target}", expected="a run of the whole pipeline there")
    if job_spec or only:
        if fail_on_reject:
            raise ConfigError("--fail-on-reject is given for a job alone, which has no gate", fix="leave it out")
        if job_spec:
            options = {"--run-id": bool(run_id), "--force": force}
            _refuse_options(options, "of a run file", "leave it out: a job spec says everything itself")
            answer = _submit_spec(job_spec, target, project, location, yes=yes, dry_run=dry_run)
        elif only == OnlyOption.probe:
            probe = _submit_probe(config, overrides or [], target, run_id, force=force, yes=yes, dry_run=dry_run)
            _follow_probe(probe, detach=detach, plain=plain, as_json=as_json)
            return
        else:
            answer = _submit_training(config, overrides or [], target, run_id, force=force, yes=yes, dry_run=dry_run)
        _follow_job(answer, detach=detach, plain=plain, as_json=as_json)
        return
    if fail_on_reject and (detach or dry_run):
        raise ConfigError(
            f"--fail-on-reject and {'--detach' if detach else '--dry-run'} are given",
            expected="a run that is watched to its end",
            fix="leave one out; vlmpipe status RUN --watch --fail-on-reject watches a run that was started",
        )
    watching = submit_and_print(
        config,
        lambda: load_source(config, overrides, target),
        [config, *(overrides or [])],
        SubmitOptions(target, run_id, yes, dry_run, detach, as_json, force),
    )
    if watching:
        result = watch_and_show(
            watching.argument,
            watching.reader(),
            on_service=True,
            plain=plain,
            as_json=as_json,
            fail_on_reject=fail_on_reject,
        )
        leave(result, fail_on_reject)


def _submit_spec(path: Path, target: str, project: str, location: str, *, yes: bool, dry_run: bool) -> SubmittedJob:
    with doing(f"checking and submitting {path}"):
        from vlmpipe.pipelines.submit_job import submit_spec
        from vlmpipe.planner.spending.approval import terminal_confirm

        ask = terminal_confirm()
        return submit_spec(path, target=target, project=project, location=location, yes=yes, dry_run=dry_run, ask=ask)


def _submit_training(
    config: str, overrides: Sequence[str], target: str, run_id: str, *, force: bool, yes: bool, dry_run: bool
) -> SubmittedJob:
    with doing(f"planning and submitting the training job of {config}"):
        from vlmpipe.pipelines.submit_job import submit_training
        from vlmpipe.planner.spending.approval import terminal_confirm
        from vlmpipe.platforms.short_names import submitted_to_continue

        run_config = load(Path(config), overrides)
        return submit_training(
            run_config,
            target=target,
            source=[config, *overrides, "--only", "train"],
            run_id=submitted_to_continue(run_id, run_config, target),
            force=force,
            yes=yes,
            dry_run=dry_run,
            ask=terminal_confirm(),
        )


def _submit_probe(
    config: str, overrides: Sequence[str], target: str, run_id: str, *, force: bool, yes: bool, dry_run: bool
) -> SubmittedProbe:
    with doing(f"planning and submitting a probe of {config}"):
        from vlmpipe.pipelines.submit_probe import submit_probe
        from vlmpipe.planner.spending.approval import terminal_confirm
        from vlmpipe.platforms.short_names import submitted_to_continue

        run_config = load(Path(config), overrides)
        return submit_probe(
            run_config,
            target=target,
            source=[config, *overrides, "--only", "probe"],
            run_id=submitted_to_continue(run_id, run_config, target),
            force=force,
            yes=yes,
            dry_run=dry_run,
            ask=terminal_confirm(),
        )


def _follow_probe(probe: SubmittedProbe, *, detach: bool, plain: bool, as_json: bool) -> None:
    """Print the request, watch the jobs to their ends unless they are detached, and print their measurements."""
    watched = [job.started for job in probe.jobs if job.started and not detach]
    if not as_json:
        print_lines(probe.lines())
    elif not watched:
        print_json(probe.as_json())
    if not watched:
        return
    from vlmpipe.pipelines.probe_sightings import note_probes

    ended = []
    for job in watched:
        ended.append(follow(job.argument, job.reader(), on_service=True, plain=plain or as_json))
        if not as_json:
            print_lines(["", *ended[-1].lines()])
    if as_json:
        print_json({**probe.as_json(), "ended": [job.as_json() for job in ended], "results": probe.results()})
    else:
        print_lines(probe.result_lines())
        print_lines(note_probes(probe.results(), probe.run_uri.rpartition("/")[2]))
    raise typer.Exit(next(filter(None, (job.exit_code for job in ended)), 0))


def _follow_job(answer: SubmittedJob, *, detach: bool, plain: bool, as_json: bool) -> None:
    """Print the request, and watch the job to its end unless it is detached."""
    started = answer.started
    if not as_json:
        print_lines(answer.lines())
    elif not started or detach:
        print_json(answer.as_json())
    if started and not detach:
        name, read = started.argument, started.reader()
        result = watch_and_show(name, read, on_service=True, plain=plain, as_json=as_json)
        leave(result, fail_on_reject=False)


def _refuse_options(options: dict[str, bool], place: str, fix: str) -> None:
    if unused := [name for name, is_given in options.items() if is_given]:
        raise ConfigError(f"{', '.join(unused)} is only for runs {place}", fix=fix)


ALL = (run, submit)
