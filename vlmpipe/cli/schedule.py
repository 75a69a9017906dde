"""`vlmpipe schedule`: recurring runs on Vertex AI or Kubeflow, as the run file describes them."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vlmpipe.cli.arguments import AsJson, Overrides, RunFile, Source, load, load_source, service_target
from vlmpipe.cli.output import doing, print_json, print_lines
from vlmpipe.platforms.table import DEFAULT, platform_of
from vlmpipe.trainer.storage.outage import answering_soon

if TYPE_CHECKING:
    from vlmpipe.platforms.schedules import RunSchedule, Schedules

Where = Annotated[str, service_target("Where the schedule is.")]

app = typer.Typer(help="Recurring runs on a service, as the run file says.", no_args_is_help=True)


@app.command("plan")
def plan_command(config: Source, overrides: Overrides = None, target: Where = DEFAULT, as_json: AsJson = False) -> None:
    """Show what apply would change. The next starts too, and the cost a month. Changes nothing."""
    from vlmpipe.pipelines.schedule import plan_schedule, schedules_of

    settings, template = load_source(config, overrides, target)
    with doing(f"planning a run and reading the schedules on {platform_of(target).title}"), answering_soon():
        plan = plan_schedule(settings, schedules_of(settings, target), _now(), template, target=target)
    print_json(plan.as_json()) if as_json else print_lines(plan.lines())


@app.command("apply")
def apply_command(
    config: Source,
    overrides: Overrides = None,
    target: Where = DEFAULT,
    force: Annotated[bool, typer.Option("--force", help="Do it without checking buckets.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask, whatever a month costs.")] = False,
    as_json: AsJson = False,
) -> None:
    """Create the run file's schedule, or change the live one to it. Doing it again changes nothing."""
    from vlmpipe.pipelines.schedule import apply_schedule
    from vlmpipe.planner.spending.approval import terminal_confirm

    source, ask = load_source(config, overrides, target), terminal_confirm()
    with doing(f"planning a run and changing the schedule on {platform_of(target).title}"):
        plan, live = apply_schedule(*source, target=target, force=force, yes=yes, ask=ask, now=_now())
    if as_json:
        print_json({**plan.as_json(), "live": live.as_json()})
        return
    done = {"create": "created", "update": "changed", "replace": "replaced", "nothing": "is already as in the run file"}
    print_lines([*plan.lines(), f"schedule {plan.wanted.name} {done[plan.action]}: {live.address}"])


@app.command("list")
def list_command(
    config: RunFile, overrides: Overrides = None, target: Where = DEFAULT, as_json: AsJson = False
) -> None:
    """List the schedules that vlmpipe made."""
    from vlmpipe.pipelines.schedule import schedules_of

    with doing(f"reading the schedules on {platform_of(target).title}"), answering_soon():
        schedules = schedules_of(load(config, overrides), target).all()
    if as_json:
        print_json({"schedules": [live.as_json() for live in schedules]})
        return
    from vlmpipe.cli.views.tables import print_schedules

    print_schedules(schedules)


@app.command("pause")
def pause_command(
    config: RunFile, overrides: Overrides = None, target: Where = DEFAULT, as_json: AsJson = False
) -> None:
    """Start no more runs until resume. Runs that have begun continue."""
    schedules, live = _find(config, overrides, target)
    _say(schedules.pause(live) if live.state == "active" else live, as_json)


@app.command("resume")
def resume_command(
    config: RunFile,
    overrides: Overrides = None,
    target: Where = DEFAULT,
    catch_up: Annotated[
        bool, typer.Option("--catch-up", help="Also start the runs that were due while it was paused.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask, whatever a month costs.")] = False,
    as_json: AsJson = False,
) -> None:
    """Start runs again, as they were scheduled. Asks before that costs much."""
    from vlmpipe.pipelines.schedule import resume_live_schedule
    from vlmpipe.planner.spending.approval import terminal_confirm

    settings, ask = load(config, overrides), terminal_confirm()
    with doing(f"planning a run and resuming the schedule on {platform_of(target).title}"):
        live = resume_live_schedule(settings, target=target, catch_up=catch_up, yes=yes, ask=ask, now=_now())
    _say(live, as_json)


@app.command("delete")
def delete_command(
    config: RunFile, overrides: Overrides = None, target: Where = DEFAULT, as_json: AsJson = False
) -> None:
    """Delete the schedule. Its runs stay, and those that have begun continue."""
    schedules, live = _find(config, overrides, target)
    schedules.delete(live)
    if as_json:
        print_json({"deleted": live.address})
    else:
        print_lines([f"schedule {live.name} is deleted: {live.address}"])


def _find(config: Path, overrides: list[str] | None, target: str) -> tuple[Schedules[Any], RunSchedule]:
    from vlmpipe.pipelines.schedule import schedules_of

    settings = load(config, overrides)
    with doing(f"reading the schedules on {platform_of(target).title}"), answering_soon():
        schedules = schedules_of(settings, target)
        return schedules, schedules.require(settings.name)


def _say(live: RunSchedule, as_json: bool) -> None:
    print_json(live.as_json()) if as_json else print_lines([f"schedule {live.name} is {live.state}: {live.address}"])


def _now() -> datetime:
    return datetime.now(UTC)
