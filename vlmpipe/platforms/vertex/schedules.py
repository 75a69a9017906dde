"""Schedules on Vertex AI: compares the live schedule with the run file, and makes the calls that align them.

A schedule is identified by its display name, the run file's name, and by a label of the jobs that it starts. The
service gives it a number as its name, so creating one is not idempotent: before a lost request is repeated, the
schedules are listed.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from google.api_core import exceptions
from google.cloud.aiplatform_v1.types import CreatePipelineJobRequest, ListSchedulesRequest, PipelineJob, Schedule
from google.protobuf import field_mask_pb2, json_format

from vlmpipe.google_cloud.client import Place, translate_errors
from vlmpipe.google_cloud.retries import Answer, may_have_arrived, retrying, send_once
from vlmpipe.platforms.compiled import run_file_in
from vlmpipe.platforms.schedules import UNSET, Change, Schedules
from vlmpipe.platforms.vertex.pipeline_job import SUBMISSION_LABEL, Submission
from vlmpipe.trainer.errors import UserError, print_warning

if TYPE_CHECKING:
    from google.cloud.aiplatform_v1.services.schedule_service import ScheduleServiceClient

    from vlmpipe.config.sections.schedule import ScheduleConfig
    from vlmpipe.planner.spending.approval import Approved

SCHEDULE_LABEL = "vlmpipe-schedule"  # the run file's name; marks the schedules that are ours
DIGEST_LABEL = "vlmpipe-digest"  # of the wanted job; also shows that something was removed from it
DIGEST_CHARS = 16
# Fields of a live schedule that are compared and updated; also start_time if the run file has one, because the service
# fills it in.
FIELDS = (
    "cron", "end_time", "max_run_count", "max_concurrent_run_count", "max_concurrent_active_run_count",
    "allow_queueing",
)  # fmt: skip
REQUEST = "create_pipeline_job_request"
DELETE_TIMEOUT_S = 60.0
ZONE = re.compile(r"(?:CRON_)?TZ=(\S+)\s+")  # before the cron fields (Schedule.cron, v1)


@dataclass(frozen=True)
class VertexSchedule:
    """A schedule of Vertex AI: the live one, or the one that a run file describes."""

    schedule: Schedule

    @property
    def name(self) -> str:
        """The run file's name; empty for a schedule that vlmpipe did not create."""
        return str(self.job.labels.get(SCHEDULE_LABEL, ""))

    @property
    def state(self) -> str:
        return str(self.schedule.state.name).lower()

    @property
    def address(self) -> str:
        return str(self.schedule.name)

    @property
    def when(self) -> str:
        return str(self.schedule.cron)

    @property
    def cron_line(self) -> str:
        return ZONE.sub("", self.when)

    @property
    def timezone(self) -> str:
        zone = ZONE.match(self.when)
        return zone[1] if zone else "UTC"

    @property
    def paused_since(self) -> datetime | None:
        return self.schedule.last_pause_time or None

    @property
    def next_start(self) -> datetime | None:
        return self.schedule.next_run_time or None

    @property
    def started(self) -> int | None:
        return int(self.schedule.started_run_count)

    @property
    def last_start(self) -> datetime | None:
        return self.schedule.end_time or None

    @property
    def runs_left(self) -> int | None:
        most = int(self.schedule.max_run_count)
        return max(0, most - int(self.schedule.started_run_count)) if most else None

    @property
    def is_over(self) -> bool:
        return self.schedule.state == Schedule.State.COMPLETED

    @property
    def digest(self) -> str:
        return str(self.job.labels.get(DIGEST_LABEL, ""))

    @property
    def run_file(self) -> Mapping[str, object] | None:
        job = _job_dict(self.job)
        runtime = job.get("runtimeConfig")
        values = runtime.get("parameterValues") if isinstance(runtime, dict) else None
        return run_file_in(job.get("pipelineSpec"), values if isinstance(values, dict) else {})

    @property
    def job(self) -> PipelineJob:
        return self.schedule.create_pipeline_job_request.pipeline_job

    def as_json(self) -> dict[str, object]:
        content = json_format.MessageToDict(Schedule.pb(self.schedule))
        content.pop("createPipelineJobRequest", None)
        return {"run_file": self.name, "digest": self.digest, **content}

    def changes_to(self, desired: VertexSchedule) -> list[Change]:
        """Changes that turn this live schedule into the wanted one."""
        fields = [*FIELDS, *(["start_time"] if desired.schedule.start_time else [])]
        ours, theirs = (json_format.MessageToDict(Schedule.pb(schedule.schedule)) for schedule in (self, desired))
        result = []
        for field in fields:
            key = _camel(field)
            if ours.get(key) != theirs.get(key):
                result.append(Change(field, _shown(ours.get(key)), _shown(theirs.get(key))))
        if self.digest != desired.digest:
            result.append(Change(REQUEST, f"job {self.digest or 'not ours'}", f"job {desired.digest}"))
        elif path := _first_difference(_job_dict(desired.job), _job_dict(self.job)):
            result.append(Change(REQUEST, f"{path} was changed", "as in the run file"))
        return result


def wanted_schedule(submission: Submission, name: str, settings: ScheduleConfig) -> VertexSchedule:
    """The schedule that starts this job. It contains the whole pipeline, which is therefore pinned."""
    job = PipelineJob(submission.job)
    labels = {key: value for key, value in job.labels.items() if key != SUBMISSION_LABEL}
    digest = hashlib.sha256(json.dumps(_job_dict(job), sort_keys=True).encode()).hexdigest()[:DIGEST_CHARS]
    job.labels = labels | {SCHEDULE_LABEL: name, DIGEST_LABEL: digest}
    schedule = Schedule(
        display_name=name,
        cron=f"TZ={settings.timezone} {settings.cron}",
        start_time=settings.start_time,
        end_time=settings.end_time,
        max_run_count=settings.max_run_count,
        # The first limits how many runs start at once, only the second how many are under way (Schedule, v1).
        max_concurrent_run_count=settings.max_concurrent_active_run_count,
        max_concurrent_active_run_count=settings.max_concurrent_active_run_count,
        allow_queueing=settings.allow_queueing,
        create_pipeline_job_request=CreatePipelineJobRequest(parent=submission.place.parent, pipeline_job=job),
    )
    return VertexSchedule(schedule)


class VertexSchedules(Schedules[VertexSchedule]):
    """The schedules of one project and location."""

    def __init__(self, place: Place, client: ScheduleServiceClient) -> None:
        super().__init__(place.parent, "the console, under Vertex AI, Pipelines, Schedules")
        self._where, self._client = place, client

    def all(self) -> list[VertexSchedule]:
        return self._call(lambda: list(self._ours(ListSchedulesRequest(parent=self._where.parent))))

    def create(self, desired: VertexSchedule, approved: Approved) -> VertexSchedule:
        """Create the schedule, once, however often an answer is lost."""
        sent, token = VertexSchedule(Schedule(desired.schedule)), secrets.token_hex(8)
        sent.job.labels[SUBMISSION_LABEL] = token
        faults: list[Exception] = []

        def attempt() -> VertexSchedule:
            if may_have_arrived(faults):
                for live in self._named_now(desired.name):
                    if live.job.labels.get(SUBMISSION_LABEL) == token:
                        return live
            return VertexSchedule(
                send_once(self._client.create_schedule, parent=self._where.parent, schedule=sent.schedule)
            )

        try:
            return self._call(attempt, faults)
        except UserError as error:
            if not may_have_arrived(faults):
                raise
            raise UserError(
                f"{error.found}; whether the schedule was made is not known",
                expected="an answer to the request that creates it",
                fix="run vlmpipe schedule apply again when Vertex AI answers: it finds the schedule if it is there",
                code=error.code,
            ) from error

    def must_replace(self, changes: Sequence[Change]) -> str:
        # "The non-empty fields cannot be unset" (UpdateScheduleRequest, v1); false is an empty allow_queueing.
        unset = " and ".join(change.field for change in changes if change.wanted == UNSET)
        made = "so apply makes a new schedule, whose count of runs begins at 0"
        return f"Vertex AI cannot unset {unset}, {made}" if unset else ""

    def update(
        self, live: VertexSchedule, desired: VertexSchedule, changes: Sequence[Change], approved: Approved
    ) -> VertexSchedule:
        if self.must_replace(changes):
            made = self._made_anew(live, desired, approved)
            self.delete(live)
            return made
        schedule = Schedule(desired.schedule)
        schedule.name = live.schedule.name
        VertexSchedule(schedule).job.labels[SUBMISSION_LABEL] = live.job.labels.get(SUBMISSION_LABEL, "")
        mask = field_mask_pb2.FieldMask(paths=[change.field for change in changes])
        return VertexSchedule(
            self._call(lambda: send_once(self._client.update_schedule, schedule=schedule, update_mask=mask))
        )

    def _made_anew(self, live: VertexSchedule, desired: VertexSchedule, approved: Approved) -> VertexSchedule:
        """The wanted schedule in the state of the live one, which is paused: together, both would start what is due."""
        if live.schedule.state == Schedule.State.PAUSED:
            made = self.create(desired, approved)
            try:
                made = self.pause(made)
            except UserError:  # a person stopped these runs: the new schedule must not start them
                self.delete(made)
                raise
            if made.started:
                print_warning(f"{made.address} started {made.started} runs before it was paused", step="schedule")
            return made
        self.pause(live)
        try:
            made = self.create(desired, approved)
        except UserError as error:
            self._resume_after(live, error, approved)
            raise
        due = live.next_start
        if due and due <= datetime.now(UTC):
            print_warning(f"the run that was due at {due:%Y-%m-%d %H:%M} UTC was not started", step="schedule")
        return made

    def _resume_after(self, live: VertexSchedule, error: UserError, approved: Approved) -> None:
        """Let the old schedule start runs again, those that were due meanwhile too, where no new one was made."""
        try:
            self.resume(live, approved, catch_up=True)
        except UserError as second:
            raise UserError(
                f"{error.found}\n  also:     {live.address} is paused and could not be resumed: {second.found}",
                expected=error.expected,
                fix=f"{error.fix}\nvlmpipe schedule resume CONFIG --catch-up lets the old schedule start runs again",
                code=error.code,
            ) from error

    def pause(self, live: VertexSchedule) -> VertexSchedule:
        self._call(lambda: send_once(self._client.pause_schedule, name=live.schedule.name))
        return self._get(live)

    def resume(self, live: VertexSchedule, approved: Approved, *, catch_up: bool) -> VertexSchedule:
        request = {"name": live.schedule.name, "catch_up": catch_up}
        self._call(lambda: send_once(self._client.resume_schedule, request=request))
        return self._get(live)

    def delete(self, live: VertexSchedule) -> None:
        faults: list[Exception] = []

        def attempt() -> None:
            try:
                operation = send_once(self._client.delete_schedule, name=live.schedule.name)
                operation.result(timeout=DELETE_TIMEOUT_S)
            except exceptions.NotFound:
                if not may_have_arrived(faults):  # else our own deletion, whose answer was lost
                    raise

        self._call(attempt, faults)

    def _get(self, live: VertexSchedule) -> VertexSchedule:
        return VertexSchedule(self._call(lambda: send_once(self._client.get_schedule, name=live.schedule.name)))

    def _named(self, name: str) -> Iterator[VertexSchedule]:
        return iter(self._call(lambda: self._named_now(name)))

    def _named_now(self, name: str) -> list[VertexSchedule]:
        request = ListSchedulesRequest(parent=self._where.parent, filter=f'display_name="{name}"')
        return [live for live in self._ours(request) if live.name == name]

    def _ours(self, request: ListSchedulesRequest) -> Iterator[VertexSchedule]:
        result = map(VertexSchedule, send_once(self._client.list_schedules, request=request))
        return (live for live in result if live.name)

    def _call(self, call: Callable[[], Answer], faults: list[Exception] | None = None) -> Answer:
        with translate_errors(self._where):
            return retrying(call, faults)


def _job_dict(job: PipelineJob) -> dict[str, object]:
    """The job, without the label that differs with every creation."""
    content = dict(json_format.MessageToDict(PipelineJob.pb(job)))
    content.get("labels", {}).pop(SUBMISSION_LABEL, None)
    return content


def _first_difference(desired: object, live: object, path: str = "") -> str:
    """Path of the first wanted value that the live job lacks; empty for none. The service may add others."""
    if isinstance(desired, dict) and isinstance(live, dict):
        paths = (_first_difference(value, live.get(key), f"{path}.{key}") for key, value in desired.items())
        return next(filter(None, paths), "")
    return "" if desired == live else path.lstrip(".")


def _camel(field: str) -> str:
    first, *others = field.split("_")
    return first + "".join(word.title() for word in others)


def _shown(value: object) -> str:
    return UNSET if value is None else str(value)
