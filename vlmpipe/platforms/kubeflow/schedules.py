"""Schedules on Kubeflow Pipelines, which calls them recurring runs.

Its API can create, enable, disable and delete one, and change nothing else, so a changed schedule is replaced. It has
no labels: a schedule of ours has the run file's name as its own and the digest of its pipeline in its description. Its
scheduler reads cron lines with seconds in UTC, starts what is due when a place is free, and knows no last run
(kubeflow/pipelines, backend/src/crd/controller/scheduledworkflow).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from vlmpipe.planner.cost.cron import starts_after
from vlmpipe.platforms.compiled import run_file_in
from vlmpipe.platforms.kubeflow.runs.client import KubeflowApi
from vlmpipe.platforms.kubeflow.runs.version import require_version
from vlmpipe.platforms.pipeline_yaml import documents
from vlmpipe.platforms.schedules import Change, Schedules
from vlmpipe.trainer.errors import ConfigError

if TYPE_CHECKING:
    import kfp_server_api

    from vlmpipe.config.sections.schedule import ScheduleConfig
    from vlmpipe.planner.spending.approval import Approved

OURS = re.compile(r"vlmpipe schedule, pipeline ([0-9a-f]{16})")
PAGE_SIZE = 100
MAX_AT_ONCE = 10  # the service's own limit
SEVEN = re.compile(r"(?<![-/\d])7(?![-\d])")  # Sunday, which the service writes 0


@dataclass(frozen=True)
class KubeflowSchedule:
    """A recurring run: the live one, or the one that a run file describes. cron: with seconds, in UTC."""

    name: str
    cron: str
    digest: str
    at_once: int
    no_catchup: bool
    start_time: datetime | None = None
    end_time: datetime | None = None
    package: Path | None = None  # of a wanted one
    address: str = ""
    is_enabled: bool = True
    run_file: Mapping[str, object] | None = None  # of a live one

    @property
    def state(self) -> str:
        if self.is_over:
            return "completed"
        return "active" if self.is_enabled else "paused"

    @property
    def is_over(self) -> bool:
        return self.end_time is not None and self.end_time < datetime.now(UTC)

    @property
    def when(self) -> str:
        return f"{self.cron} (with seconds, UTC)"

    @property
    def cron_line(self) -> str:
        return self.cron.partition(" ")[2]

    @property
    def timezone(self) -> str:
        return "UTC"

    @property
    def paused_since(self) -> datetime | None:
        return None  # the service does not say

    @property
    def next_start(self) -> datetime | None:
        after = max(filter(None, (datetime.now(UTC), self.start_time)))
        following = next(iter(starts_after(self.cron_line, "UTC", after)), None)
        over = following is None or (self.end_time is not None and following > self.end_time)
        return None if over or not self.is_enabled else following

    @property
    def started(self) -> int | None:
        return None  # the service does not count them

    @property
    def last_start(self) -> datetime | None:
        return self.end_time

    @property
    def runs_left(self) -> int | None:
        return None  # the service has no such limit

    def as_json(self) -> dict[str, object]:
        return {
            "run_file": self.name,
            "digest": self.digest,
            "name": self.address,
            "state": self.state.upper(),
            "cron": self.cron,
            "start_time": self.start_time.isoformat() if self.start_time else None,
            "end_time": self.end_time.isoformat() if self.end_time else None,
            "max_concurrency": self.at_once,
            "no_catchup": self.no_catchup,
        }

    def changes_to(self, desired: KubeflowSchedule) -> list[Change]:
        fields = {"cron": "cron", "start_time": "start_time", "end_time": "end_time", "at_once": "max_concurrency"}
        fields |= {"no_catchup": "no_catchup", "digest": "pipeline"}
        return [
            Change(shown, str(getattr(self, field)), str(getattr(desired, field)))
            for field, shown in fields.items()
            if getattr(self, field) != getattr(desired, field)
        ]


def wanted_recurring_run(name: str, settings: ScheduleConfig, package: Path) -> KubeflowSchedule:
    """The schedule that starts this compiled pipeline. Raises ConfigError for what Kubeflow's scheduler cannot do."""
    _require_possible(settings)
    *others, weekday = settings.cron.split()
    weekday = SEVEN.sub("0", weekday)
    if re.search(r"(?<!/)7", weekday):
        raise ConfigError(
            f"schedule.cron is {settings.cron!r}",
            expected="weekdays from 0, which is Sunday, to 6: Kubeflow's scheduler knows no 7",
            fix="write a range that ends with Sunday as a list, such as 5,6,0",
        )
    content = json.dumps(documents(package.read_bytes()), sort_keys=True)
    return KubeflowSchedule(
        name=name,
        cron=" ".join(["0", *others, weekday]),
        digest=hashlib.sha256(content.encode()).hexdigest()[:16],
        at_once=settings.max_concurrent_active_run_count,
        no_catchup=not settings.allow_queueing,
        start_time=_ahead(_moment(settings.start_time)),
        end_time=_moment(settings.end_time),
        package=package,
    )


def _require_possible(settings: ScheduleConfig) -> None:
    if settings.timezone not in ("UTC", "Etc/UTC"):
        raise ConfigError(
            f"schedule.timezone is {settings.timezone}",
            expected="UTC: Kubeflow's scheduler has one time zone for all schedules",
            fix="write schedule.cron in UTC and leave schedule.timezone out",
        )
    if settings.max_run_count:
        raise ConfigError(
            "schedule.max_run_count is set",
            expected="an end by schedule.end_time: Kubeflow's scheduler counts no runs",
        )
    if settings.max_concurrent_active_run_count > MAX_AT_ONCE:
        raise ConfigError(
            f"schedule.max_concurrent_active_run_count is {settings.max_concurrent_active_run_count}",
            expected=f"at most {MAX_AT_ONCE} on Kubeflow",
        )


def _moment(time: datetime | None) -> datetime | None:
    """Return the time in whole seconds of UTC, as the service stores it."""
    if time is None:
        return None
    return time.astimezone(UTC).replace(microsecond=0)


def _ahead(start: datetime | None) -> datetime | None:
    """A start that is yet to come. From one that is past, the scheduler counts what it takes to be due since then."""
    return start if start and start > datetime.now(UTC) else None


class KubeflowSchedules(Schedules[KubeflowSchedule]):
    """The recurring runs of one Kubeflow Pipelines, and of a namespace there where it has several users."""

    def __init__(self, endpoint: str, namespace: str, experiment: str) -> None:
        super().__init__(endpoint, "Kubeflow's page Recurring Runs")
        self._api, self._experiment = KubeflowApi(endpoint, namespace), experiment

    def require_possible(self, desired: KubeflowSchedule) -> str:
        assert desired.package, "a schedule that a run file describes has one"
        return require_version(self._api, desired.package)

    def all(self) -> list[KubeflowSchedule]:
        result: list[KubeflowSchedule] = []
        token = ""
        while True:
            with self._api.translated("list the recurring runs of"):
                answer = self._api.client.list_recurring_runs(
                    page_token=token, page_size=PAGE_SIZE, namespace=self._api.namespace or None
                )
            result += [live for live in map(_live, answer.recurring_runs or ()) if live]
            token = answer.next_page_token or ""
            if not token:
                return sorted(result, key=lambda schedule: schedule.name)

    def create(self, desired: KubeflowSchedule, approved: Approved) -> KubeflowSchedule:
        return self._create(desired, approved, is_enabled=True)

    def must_replace(self, changes: Sequence[Change]) -> str:
        return "Kubeflow changes no recurring run, so apply makes a new one" if changes else ""

    def update(
        self, live: KubeflowSchedule, desired: KubeflowSchedule, changes: Sequence[Change], approved: Approved
    ) -> KubeflowSchedule:
        made = self._create(desired, approved, is_enabled=False)  # with the old one, both would start what is due
        self.delete(live)
        if not live.is_enabled:
            return made
        with self._api.translated(f"enable the new schedule of {desired.name} on"):
            self._api.client.enable_recurring_run(made.address)
        return self._get(made)

    def pause(self, live: KubeflowSchedule) -> KubeflowSchedule:
        with self._api.translated(f"pause {live.name} on"):
            self._api.client.disable_recurring_run(live.address)
        return self._get(live)

    def require_resumable(self, live: KubeflowSchedule, *, catch_up: bool) -> None:
        if catch_up == live.no_catchup:
            started = "only the last" if live.no_catchup else "each"
            raise ConfigError(
                f"{'--catch-up' if catch_up else 'resume without --catch-up'} for schedule {live.name}",
                expected=f"the other: it was made to start {started} of the runs that were due during a pause",
                fix="set schedule.allow_queueing in the run file, and vlmpipe schedule apply",
            )

    def resume(self, live: KubeflowSchedule, approved: Approved, *, catch_up: bool) -> KubeflowSchedule:
        with self._api.translated(f"resume {live.name} on"):
            self._api.client.enable_recurring_run(live.address)
        return self._get(live)

    def delete(self, live: KubeflowSchedule) -> None:
        with self._api.translated(f"delete {live.name} on"):
            self._api.client.delete_recurring_run(live.address)

    def _create(self, desired: KubeflowSchedule, approved: Approved, *, is_enabled: bool) -> KubeflowSchedule:
        with self._api.translated("create a recurring run on"):
            made = self._api.client.create_recurring_run(
                self._api.experiment(self._experiment),
                desired.name,
                description=f"vlmpipe schedule, pipeline {desired.digest}",
                start_time=_text(desired.start_time),
                end_time=_text(desired.end_time),
                cron_expression=desired.cron,
                max_concurrency=desired.at_once,
                no_catchup=desired.no_catchup,
                params={},
                pipeline_package_path=str(desired.package),
                enabled=is_enabled,
            )
        live = _live(made)
        assert live
        return live

    def _get(self, live: KubeflowSchedule) -> KubeflowSchedule:
        with self._api.translated(f"read {live.name} of"):
            result = _live(self._api.client.get_recurring_run(live.address))
        assert result
        return result


def _live(schedule: kfp_server_api.V2beta1RecurringRun) -> KubeflowSchedule | None:
    """Return the recurring run as a schedule, or None if vlmpipe did not make it."""
    ours = OURS.fullmatch(schedule.description or "")
    cron, runtime = schedule.trigger and schedule.trigger.cron_schedule, schedule.runtime_config
    if not ours or not cron:
        return None
    return KubeflowSchedule(
        name=schedule.display_name,
        cron=cron.cron,
        digest=ours[1],
        at_once=int(schedule.max_concurrency),
        no_catchup=bool(schedule.no_catchup),
        start_time=_ahead(_moment(cron.start_time)),
        end_time=_moment(cron.end_time),
        address=schedule.recurring_run_id,
        is_enabled=schedule.status == "ENABLED",
        run_file=run_file_in(schedule.pipeline_spec, (runtime.parameters if runtime else None) or {}),
    )


def _text(time: datetime | None) -> str | None:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ") if time else None
