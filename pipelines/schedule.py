"""`vlmpipe schedule plan` and `apply`: the changes, their cost a month, and applying them."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlmpipe.config.run_config import parse_run_config
from vlmpipe.pipelines.submit import compiler
from vlmpipe.planner.cost.cron import require_starts, runs_per_month, starts_after
from vlmpipe.planner.spending.approval import (
    Spending,
    dollars,
    fail_on_error,
    on_own_machines,
    reasons_to_confirm,
    require_approval,
    spending_of,
)
from vlmpipe.planner.steps.estimate import HOURS_PER_MONTH
from vlmpipe.planner.sweep import plan_config
from vlmpipe.platforms.schedules import Change, RunSchedule, Schedules
from vlmpipe.platforms.table import DEFAULT, platform_of
from vlmpipe.trainer.config.job import without_gone
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.storage.outage import answering_soon

if TYPE_CHECKING:
    from vlmpipe.config.run_config import RunConfig
    from vlmpipe.config.sections.schedule import ScheduleConfig
    from vlmpipe.platforms.base import Platform
    from vlmpipe.platforms.compiled import Template

STARTS_SHOWN = 3


@dataclass(frozen=True)
class SchedulePlan:
    """The schedule that a run file wants beside the one that is live."""

    platform: Platform
    wanted: RunSchedule
    settings: ScheduleConfig
    live: RunSchedule | None  # None: there is none, or only one that is over
    changes: list[Change]
    replaces: str  # why the changes need a new schedule; empty where the live one can be changed
    month: Spending  # of all runs of a month
    runs_per_month: float
    question: str  # the reason to confirm; empty for a schedule that needs none
    pipeline: Path
    starts: list[dt.datetime]
    notes: tuple[str, ...] = ()  # checks that were not possible

    @property
    def action(self) -> str:
        if self.live is None:
            return "create"
        if self.replaces:
            return "replace"
        return "update" if self.changes else "nothing"

    def as_json(self) -> dict[str, object]:
        return {
            "schedule": self.wanted.name,
            "action": self.action,
            "changes": [vars(change) for change in self.changes],
            "live": self.live.as_json() if self.live else None,
            "cron": self.wanted.when,
            "next_starts": [start.isoformat() for start in self.starts],
            "runs_per_month": self.runs_per_month,
            "usd_per_month": self.month.usd,
            "plan": self.month.state,
            "needs_a_yes": self.question or None,
            "digest": self.wanted.digest,
            "pipeline": str(self.pipeline),
            "notes": [*filter(None, [self.replaces]), *self.notes],
        }

    def lines(self) -> list[str]:
        first = {
            "create": f"schedule {self.wanted.name}: not there; apply creates it",
            "update": f"schedule {self.wanted.name}: apply changes {len(self.changes)} of its fields",
            "replace": f"schedule {self.wanted.name}: apply makes a new one and deletes the one that is live",
            "nothing": f"schedule {self.wanted.name}: live and as the run file says; apply does nothing",
        }
        at_once = self.settings.max_concurrent_active_run_count
        cost = "not known" if self.month.usd is None else f"about {dollars(self.month.usd)} a month"
        term = f", {self.month.term}" if self.platform.has_prices else ""  # machines of one's own have none
        table = {
            "when": f"{self.settings.cron} in {self.settings.timezone}, {self.runs_per_month:.1f} runs a month",
            "next": ", ".join(f"{start:%a %Y-%m-%d %H:%M %Z}" for start in self.starts) or "never",
            "at once": f"{at_once} run{'s' if at_once > 1 else ''}; {self.platform.meanwhile(self.settings)}",
            "cost": f"{cost}, {self.month.machines}{term} (plan: {self.month.state})",
            "pipeline": f"{self.pipeline}, job {self.wanted.digest}",
        }
        if self.live:
            table["live"] = f"{self.live.address}, {self.live.state}"
        if self.question:
            table["asks"] = f"{self.question}; --yes answers"
        notes = filter(None, [self.replaces, *self.notes])
        lines = [first[self.action], *(f"  note: {note}" for note in notes)]
        lines += [f"  {name:<9} {value}" for name, value in table.items()]
        return lines + [f"  change    {change.field}: {change.live} -> {change.wanted}" for change in self.changes]


def plan_schedule(
    config: RunConfig,
    schedules: Schedules[Any],
    now: dt.datetime,
    template: Template | None = None,
    *,
    target: str = DEFAULT,
) -> SchedulePlan:
    """Compare the run file's schedule with the live one. Nothing is changed there.

    With a template, whose run file `config` is, the published pipeline is started instead of one compiled here.

    Raises ConfigError for a run file without a schedule, or whose plan is red.
    """
    settings = config.schedule
    if settings is None:
        raise ConfigError(
            f"{config.name} has no schedule section",
            expected="schedule.cron at least, for example schedule.cron='0 3 * * 1'",
        )
    require_starts(settings, now)
    spending = spending_of(config, plan_config(config))
    fail_on_error(spending, force=False)
    platform = platform_of(target)
    job = config.model_copy(update={"schedule": None})  # runs do not depend on when they start
    schedule, pipeline = platform.wanted_schedule(job, settings, template, compiler(target))
    live = schedules.find(config.name)
    live = None if live is None or live.is_over else live
    changes = live.changes_to(schedule) if live else []
    replaces = schedules.must_replace(changes)
    if not platform.has_prices:
        spending = on_own_machines(config, spending)
    runs = runs_per_month(settings.cron)
    month = spending.times(runs, f"a month of {config.name}")
    first = max(now, settings.start_time) if settings.start_time else now
    starts = starts_after(settings.cron, settings.timezone, first)
    coming = takewhile(lambda start: not settings.end_time or start <= settings.end_time, starts)
    return SchedulePlan(
        platform=platform,
        wanted=schedule,
        settings=settings,
        live=live,
        changes=changes,
        replaces=replaces,
        month=month,
        runs_per_month=runs,
        question=reasons_to_confirm(month, config.plan.confirm_above_usd),
        pipeline=pipeline,
        notes=tuple(filter(None, [schedules.require_possible(schedule)])),
        starts=list(islice(coming, min(STARTS_SHOWN, settings.max_run_count or STARTS_SHOWN))),
    )


def apply_schedule(
    config: RunConfig,
    template: Template | None = None,
    *,
    target: str = DEFAULT,
    force: bool,
    yes: bool,
    ask: Callable[[str], bool] | None,
    now: dt.datetime,
) -> tuple[SchedulePlan, RunSchedule]:
    """Change the live schedule to the run file's, or create it. Idempotent. `force` skips the check of buckets.

    Raises UserError where that is not possible.
    """
    with answering_soon():
        schedules = schedules_of(config, target)
        plan = plan_schedule(config, schedules, now, template, target=target)
    if plan.live and not plan.changes:
        return plan, plan.live
    if not force:
        # Otherwise the first run would fail, at night.
        plan = replace(plan, notes=(*plan.notes, *plan.platform.check_storage(config)))
    limit_usd = config.plan.confirm_above_usd
    approved = require_approval(plan.month, confirm_above_usd=limit_usd, force=False, yes=yes, dry_run=False, ask=ask)
    if plan.live:
        return plan, schedules.update(plan.live, plan.wanted, plan.changes, approved)
    return plan, schedules.create(plan.wanted, approved)


def resume_live_schedule(
    config: RunConfig,
    *,
    target: str,
    catch_up: bool,
    yes: bool,
    ask: Callable[[str], bool] | None,
    now: dt.datetime,
) -> RunSchedule:
    """Let a paused schedule start runs again, once their cost is approved. Another one is left as it is.

    The figures are those of the live schedule: the plan of the run file that its runs read, with the prices of the one
    given, and its cron line; a month, and with `catch_up` the runs that were due since the pause. Raises UserError
    where there is no such schedule, or no approval.
    """
    with answering_soon():
        schedules = schedules_of(config, target)
        live: RunSchedule = schedules.require(config.name)
        if live.state != "paused":
            return live
        schedules.require_resumable(live, catch_up=catch_up)
        run, which = _of_live_runs(config, live, target)
    coming = _coming(run, live, f"{config.name}{which}", catch_up=catch_up, now=now)
    limit_usd = config.plan.confirm_above_usd
    approved = require_approval(coming, confirm_above_usd=limit_usd, force=False, yes=yes, dry_run=False, ask=ask)
    return schedules.resume(live, approved, catch_up=catch_up)


def _of_live_runs(config: RunConfig, live: RunSchedule, target: str) -> tuple[Spending, str]:
    """Spending of a run of the live schedule, and how it differs from one of the run file, for the name of the sum.

    `plan` is the run file's own: its prices, and what it says of samples, are those that are known now.
    """
    job = config.model_copy(update={"schedule": None})
    scheduled, unread = job, "the service does not show the run file that its runs read"
    if live.run_file is not None:
        try:
            content = {**without_gone(live.run_file), "plan": config.plan.model_dump(mode="json"), "schedule": None}
            scheduled, unread = parse_run_config(content, live.address), ""
        except ConfigError as error:
            unread = f"this version does not take the run file that its runs read ({error.found})"
    run = spending_of(scheduled, plan_config(scheduled))
    if not platform_of(target).has_prices:
        run = on_own_machines(scheduled, run)
    if unread:
        return replace(run, usd=None, hours=None, usd_range=None, unknown=unread), ""
    return run, "" if scheduled == job else ", as it is scheduled and not as in the run file,"


def _coming(run: Spending, live: RunSchedule, name: str, *, catch_up: bool, now: dt.datetime) -> Spending:
    """Spending of the runs that a resumed schedule starts at once and in a month, within its end and its limit of runs.

    Runs that cost nothing do so however many they are.
    """
    costs_nothing = run.usd == 0 and not run.serving_usd_per_month and not run.left_out
    most = math.inf if live.runs_left is None else live.runs_left
    try:
        runs = min(most, _month_of(live, now))
    except ConfigError:
        if costs_nothing:
            return replace(run, name=f"runs of {name}", hours=None)
        unknown = f"its cron line {live.cron_line!r}, which vlmpipe did not write, is not read here"
        return replace(run, name=f"a month of {name}", usd=None, hours=None, usd_range=None, unknown=unknown)
    if not catch_up:
        return run.times(runs, f"a month of {name}")
    title = f"a month of {name} with the runs that were due during the pause"
    if live.paused_since is None:
        if costs_nothing:
            return replace(run, name=title, hours=None)
        unknown = "the service does not say since when the schedule is paused"
        return replace(run, name=title, usd=None, hours=None, usd_range=None, unknown=unknown)
    until = min(now, live.last_start or now)
    due = takewhile(lambda start: start <= until, starts_after(live.cron_line, live.timezone, live.paused_since))
    return run.times(min(most, runs + sum(1 for _ in due)), title)


def _month_of(live: RunSchedule, now: dt.datetime) -> float:
    """Runs of a month by the cron line, or those until the schedule's end where that comes first."""
    mean, end = runs_per_month(live.cron_line), live.last_start
    if end is None or end > now + dt.timedelta(hours=HOURS_PER_MONTH):
        return mean
    return sum(1 for _ in takewhile(lambda start: start <= end, starts_after(live.cron_line, live.timezone, now)))


def schedules_of(config: RunConfig, target: str = DEFAULT) -> Schedules[Any]:
    """The schedules where the run file's is. Raises ConfigError where it does not say where."""
    return platform_of(target).schedules(config)
