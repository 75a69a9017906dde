"""`vlmpipe schedule plan` and `apply`: the changes, their cost a month, and applying them."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vlmpipe.config.target_requirements import require_kubeflow, require_reached_files, require_vertex
from vlmpipe.pipelines.compile import FOLDER, compile_pipeline
from vlmpipe.pipelines.submit import require_own_project
from vlmpipe.pipelines.submit_kubeflow import endpoint_of
from vlmpipe.planner.cost.cron import require_starts, runs_per_month, starts_after
from vlmpipe.planner.spending.approval import (
    Spending,
    dollars,
    fail_on_error,
    reasons_to_confirm,
    require_approval,
    spending_of,
)
from vlmpipe.planner.sweep import plan_config
from vlmpipe.platforms.schedules import Change, RunSchedule, Schedules
from vlmpipe.platforms.vertex.bucket_checks import require_buckets
from vlmpipe.platforms.vertex.client import Place, schedule_client
from vlmpipe.platforms.vertex.pipeline_job import prepare
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.storage.outage import answering_soon

if TYPE_CHECKING:
    from vlmpipe.config.run_config import RunConfig
    from vlmpipe.config.sections.schedule import ScheduleConfig
    from vlmpipe.pipelines.templates.publish import Template

STARTS_SHOWN = 3

ScheduleTarget = Literal["vertex", "kubeflow"]


@dataclass(frozen=True)
class SchedulePlan:
    """The schedule that a run file wants beside the one that is live."""

    target: ScheduleTarget
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

    def as_json(self) -> dict[str, Any]:
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
        term = "" if self.target == "kubeflow" else f", {self.month.term}"  # machines of one's own have none
        table = {
            "when": f"{self.settings.cron} in {self.settings.timezone}, {self.runs_per_month:.1f} runs a month",
            "next": ", ".join(f"{start:%a %Y-%m-%d %H:%M %Z}" for start in self.starts) or "never",
            "at once": f"{at_once} run{'s' if at_once > 1 else ''}; {self._meanwhile}",
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

    @property
    def _meanwhile(self) -> str:
        """Policy for runs that are due while too many are active."""
        if self.target == "kubeflow":
            which = "each" if self.settings.allow_queueing else "the latest"
            return f"of runs due while others are active, {which} starts afterwards"
        return f"a run due while others are active {'waits' if self.settings.allow_queueing else 'is skipped'}"


def plan_schedule(
    config: RunConfig,
    schedules: Schedules[Any],
    now: dt.datetime,
    template: Template | None = None,
    *,
    target: ScheduleTarget = "vertex",
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
    wanted, pipeline = _wanted(config, settings, template, target)
    live = schedules.find(config.name)
    live = None if live is None or live.is_over else live
    changes = live.changes_to(wanted) if live else []
    replaces = schedules.must_replace(changes)
    if target == "kubeflow":
        spending = replace(spending, usd=None, unknown="machines of your own have no price here")
    runs = runs_per_month(settings.cron)
    month = replace(
        spending,
        name=f"a month of {config.name}",
        usd=None if spending.usd is None else spending.usd * runs,
        hours=None if spending.hours is None else spending.hours * runs,
    )
    first = max(now, settings.start_time) if settings.start_time else now
    starts = starts_after(settings.cron, settings.timezone, first)
    coming = takewhile(lambda start: not settings.end_time or start <= settings.end_time, starts)
    return SchedulePlan(
        target=target,
        wanted=wanted,
        settings=settings,
        live=live,
        changes=changes,
        replaces=replaces,
        month=month,
        runs_per_month=runs,
        question="" if target == "kubeflow" else reasons_to_confirm(month, config.plan.confirm_above_usd),
        pipeline=pipeline,
        notes=tuple(filter(None, [schedules.require_possible(wanted)])),
        starts=list(islice(coming, min(STARTS_SHOWN, settings.max_run_count or STARTS_SHOWN))),
    )


def _wanted(
    config: RunConfig, settings: ScheduleConfig, template: Template | None, target: ScheduleTarget
) -> tuple[RunSchedule, Path]:
    """The schedule of the run file, and its compiled pipeline."""
    job = config.model_copy(update={"schedule": None})  # runs do not depend on when they start
    if target == "kubeflow":
        from vlmpipe.platforms.kubeflow.schedules import wanted_recurring_run

        if template:
            raise ConfigError(f"{template.address} is a pipeline of Vertex AI", expected="a run file for Kubeflow")
        path = compile_pipeline(job, "kubeflow", FOLDER / f"{config.name}.scheduled.kubeflow.yaml").path
        return wanted_recurring_run(config.name, settings, path), path
    from vlmpipe.platforms.vertex.schedules import wanted_schedule

    if template:
        compiled, template_uri = template.compiled, template.address
    else:
        compiled, template_uri = compile_pipeline(job, "vertex", FOLDER / f"{config.name}.scheduled.yaml"), ""
    submission = prepare(job, compiled.path, job_id="", template_uri=template_uri)
    return wanted_schedule(submission, config.name, settings), compiled.path


def apply_schedule(
    config: RunConfig,
    template: Template | None = None,
    *,
    target: ScheduleTarget = "vertex",
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
    if target == "vertex":
        if not force:
            # Otherwise the first run would fail, at night.
            plan = replace(plan, notes=(*plan.notes, *require_buckets(config)))
        limit_usd = config.plan.confirm_above_usd
        require_approval(plan.month, confirm_above_usd=limit_usd, force=False, yes=yes, ask=ask)
    if plan.live:
        return plan, schedules.update(plan.live, plan.wanted, plan.changes)
    return plan, schedules.create(plan.wanted)


def schedules_of(config: RunConfig, target: ScheduleTarget = "vertex") -> Schedules[Any]:
    """The schedules in the run file's project and location, or on its Kubeflow Pipelines. Raises ConfigError where
    these are missing."""
    if target == "kubeflow":
        from vlmpipe.platforms.kubeflow.schedules import KubeflowSchedules

        require_kubeflow(config)
        require_reached_files(config, "kubeflow")
        return KubeflowSchedules(endpoint_of(config), config.kubeflow.namespace, config.kubeflow.experiment)
    from vlmpipe.platforms.vertex.schedules import VertexSchedules

    require_vertex(config)
    require_own_project(config)
    return VertexSchedules(Place.of(config), schedule_client(config.gcp.location))
