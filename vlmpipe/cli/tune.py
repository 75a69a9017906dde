"""`vlmpipe tune`: search for good settings of training, here or on Vertex AI."""

from __future__ import annotations

import contextlib
import secrets
import sys
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from vlmpipe.cli.arguments import AsJson, Overrides, RunFile, load, run_ids, search_target
from vlmpipe.cli.output import doing, print_json, print_lines, to_stderr
from vlmpipe.platforms.table import DEFAULT, platform_of, searching
from vlmpipe.trainer.errors import ConfigError, ExitCode

if TYPE_CHECKING:
    from vlmpipe.config.run_config import RunConfig
    from vlmpipe.pipelines.tune.search import Search
    from vlmpipe.planner.spending.approval import Approved


def tune(
    config: RunFile,
    overrides: Overrides = None,
    from_run: Annotated[
        str,
        typer.Option(
            "--from",
            help="Run whose prepared data and features the trials share; required.",
            show_default=False,
            autocompletion=run_ids,
        ),
    ] = "",
    target: Annotated[str, search_target("Where the trials run.")] = searching()[0],
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start a new search even if the last one here can be continued.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the request for Vertex AI; start nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask, whatever it costs.")] = False,
    as_json: AsJson = False,
) -> None:
    """Search over fields of train and adapters, by the section tune. On this machine the table of trials is printed."""
    from vlmpipe.pipelines.tune import search as tuning
    from vlmpipe.platforms.short_names import full_name

    if not from_run:
        raise ConfigError(
            "tune has no --from",
            expected="the run whose prepared data and features the trials share",
            fix="run the pipeline once, train.max_steps=1 is enough, and add --from RUN; vlmpipe runs lists runs",
        )
    settings = load(config, overrides)
    tuning_section = tuning.require_tuning(settings)
    search_id = f"{settings.name}-tune-{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"
    approved: Approved | None = None
    platform = platform_of(target)
    if platform.is_here:
        if tuning_section.stopping != "none":
            to_stderr(f"note: tune.stopping {tuning_section.stopping} is Vertex AI's; here every trial runs to its end")
        tuning.points(tuning_section)  # an algorithm that is not here is refused before anything is written
    else:
        platform.check(settings)
        if not dry_run:
            approved = _approval(settings, yes=yes)
    root_uri = platform.root_uri(settings)
    from_run = full_name(from_run, settings.output.root_uri)
    search = tuning.open_search(settings, from_run, search_id, root_uri)
    if platform.is_here and not fresh and (earlier := tuning.unfinished_search(search, root_uri)):
        to_stderr(f"continuing search {earlier}, which was stopped (--fresh starts a new one)")
        search = tuning.open_search(settings, from_run, earlier, root_uri)
    if dry_run:
        print_json(tuning.request_of(search, DEFAULT if platform.is_here else target).as_dict())
        return
    search.write()
    if platform.is_here:
        _run(search, as_json=as_json)
    else:
        assert approved  # only a dry run has none
        _submit(search, target, approved, as_json=as_json)


def _approval(settings: RunConfig, *, yes: bool) -> Approved:
    """Approval of all trials at the price of the dearest values that are searched. Raises UserError without one."""
    from vlmpipe.pipelines.tune import search as tuning
    from vlmpipe.planner.plan import plan_run
    from vlmpipe.planner.spending.approval import require_approval, spending_of, terminal_confirm
    from vlmpipe.trainer.storage.outage import answering_soon

    assert settings.tune
    with doing(f"planning one trial of {settings.name}"), answering_soon():
        dearest = tuning.dearest_trial(settings)
        spending = replace(spending_of(dearest, plan_run(dearest)), serving_usd_per_month=0.0)  # trials deploy nothing
    trials = settings.tune.max_trial_count
    whole = spending.times(trials, f"{trials} trials of {spending.name}")
    above = settings.plan.confirm_above_usd
    return require_approval(whole, confirm_above_usd=above, force=False, yes=yes, dry_run=False, ask=terminal_confirm())


def _submit(search: Search, target: str, approved: Approved, *, as_json: bool) -> None:
    from vlmpipe.pipelines.tune.search import request_of
    from vlmpipe.runs.submitted import RunRecord

    with doing(f"submitting search {search.search_id}"):
        name = request_of(search, target).send(approved)
    # `vlmpipe status` and `cancel` then know the search by its id
    RunRecord(name, search.uri, datetime.now(UTC).timestamp(), approved.spending.usd, service=target).write(
        search.search_id
    )
    if as_json:
        print_json({"search_id": search.search_id, "resource_name": name, "uri": search.uri})
        return
    lines = [f"search {search.search_id} started: {name}", f"  trials     {search.uri}/trial-N"]
    print_lines([*lines, f"  to follow  vlmpipe status {search.search_id} --watch"])


def _run(search: Search, *, as_json: bool) -> None:
    from vlmpipe.pipelines.tune.search import SearchStoppedError, run_search
    from vlmpipe.runs.searches import TABLE, ranked, table_lines

    if not as_json:
        to_stderr(f"search {search.search_id}: {search.uri}")
    try:
        with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():  # lines of the trials
            trials = run_search(search)
    except SearchStoppedError as stopped:
        if stopped.trials and not as_json:
            print_lines(table_lines(ranked(stopped.trials, search.tune.goal), search.tune.metric))
        raise
    best = trials[0] if trials and trials[0].metric is not None else None
    if as_json:
        print_json({"search_id": search.search_id, "uri": search.uri, "trials": [vars(trial) for trial in trials]})
    else:
        print_lines([*table_lines(trials, search.tune.metric), f"table: {search.uri}/{TABLE}"])
    raise typer.Exit(ExitCode.OK if best else ExitCode.UNEXPECTED)
