"""The schedules of the stand-in for Vertex AI: strict about fields, masks, filters and states."""

from __future__ import annotations

import datetime as dt
import re
import zoneinfo
from collections.abc import Callable

from google.cloud.aiplatform_v1.types import PipelineJob, Schedule
from google.longrunning.operations_pb2 import Operation
from google.protobuf import json_format
from google.protobuf.empty_pb2 import Empty

from vlmpipe.planner.cost.cron import starts_after
from vlmpipe.rehearsal.http_server import ApiError
from vlmpipe.rehearsal.vertex.messages import Call, Json, as_dict, fields_of, refuse_output_only
from vlmpipe.rehearsal.vertex.rules import check_display_name

CRON = re.compile(r"(?:(?:CRON_)?TZ=(\S+) )?(\S+ \S+ \S+ \S+ \S+)")
FILTER = re.compile(r'display_name="([^"]*)"')
OUTPUT_ONLY = {
    "name", "started_run_count", "state", "create_time", "update_time", "next_run_time", "last_pause_time",
    "last_resume_time", "catch_up", "last_scheduled_run_response",
}  # fmt: skip
# "The following fields can be updated" (UpdateScheduleRequest, v1), and the limit that came later.
UPDATABLE = {
    "cron", "start_time", "end_time", "max_run_count", "max_concurrent_run_count", "max_concurrent_active_run_count",
    "allow_queueing", "create_pipeline_job_request",
}  # fmt: skip
REQUIRED = ("display_name", "cron", "max_concurrent_run_count", "create_pipeline_job_request")
PAGE = 2  # small, so that paging is met

CheckJob = Callable[[PipelineJob], None]


class Schedules:
    """State in memory. `check_job` raises ApiError for a bad pipeline job."""

    def __init__(self, parent: str, check_job: CheckJob) -> None:
        self.schedules: dict[str, Schedule] = {}
        self._parent, self._check_job = parent, check_job
        self._made = 0

    def answer(self, call: Call) -> Json:
        return call.route(
            {
                ("POST", False, ""): lambda: self._create(call),
                ("GET", False, ""): lambda: self._list(call),
                ("GET", True, ""): lambda: as_dict(self._known(call.name)),
                ("PATCH", True, ""): lambda: self._update(call),
                ("DELETE", True, ""): lambda: self._delete(call.name),
                ("POST", True, "pause"): lambda: self._pause(call),
                ("POST", True, "resume"): lambda: self._resume(call),
            }
        )

    def _create(self, call: Call) -> Json:
        schedule = call.parse(Schedule)
        self._check(schedule)
        self._made += 1
        schedule.name = f"{self._parent}/schedules/{1000 + self._made}"
        schedule.state = Schedule.State.ACTIVE
        schedule.create_time = schedule.update_time = dt.datetime.now(dt.UTC)
        schedule.start_time = schedule.start_time or schedule.create_time
        self._plan_next(schedule)
        self.schedules[schedule.name] = schedule
        return as_dict(schedule)

    def _list(self, call: Call) -> Json:
        requested = call.query.get("filter", "")
        match = FILTER.fullmatch(requested)
        if requested and not match:
            raise ApiError(501, f"a filter that this fake does not know: {requested}")
        matching = [schedule for schedule in self.schedules.values() if not match or schedule.display_name == match[1]]
        return call.page(matching, PAGE)

    def _update(self, call: Call) -> Json:
        name, live, sent = call.name, self._known(call.name), call.parse(Schedule)
        if live.state == Schedule.State.COMPLETED:
            raise ApiError(400, f"schedule {name} is COMPLETED and cannot be updated")
        paths = {_snake(path) for path in call.query.get("updateMask", "").split(",") if path}
        if not paths or not paths <= UPDATABLE:
            raise ApiError(400, f"update_mask: {sorted(paths - UPDATABLE) or 'empty'}")
        # "The non-empty fields cannot be unset" (UpdateScheduleRequest, v1); a false or a 0 is an empty field.
        if unset := sorted(path for path in paths if path in fields_of(live) and path not in fields_of(sent)):
            raise ApiError(400, f"update_mask: {unset} cannot be unset")
        changed = Schedule(live)
        for path in paths:
            setattr(changed, path, getattr(sent, path))
        self._check(changed, new=False)
        changed.update_time = dt.datetime.now(dt.UTC)
        self._plan_next(changed)
        self.schedules[name] = changed
        return as_dict(changed)

    def _pause(self, call: Call) -> Json:
        call.require_fields()
        schedule = self._move(call.name, Schedule.State.ACTIVE, Schedule.State.PAUSED)
        schedule.last_pause_time = dt.datetime.now(dt.UTC)
        return {}

    def _resume(self, call: Call) -> Json:
        content = call.require_fields("catchUp")
        schedule = self._move(call.name, Schedule.State.PAUSED, Schedule.State.ACTIVE)
        schedule.catch_up = bool(content.get("catchUp", False))
        schedule.last_resume_time = dt.datetime.now(dt.UTC)
        return {}

    def _delete(self, name: str) -> Json:
        del self.schedules[self._known(name).name]
        operation = Operation(name=f"{name}/operations/1", done=True)
        operation.response.Pack(Empty())
        return dict(json_format.MessageToDict(operation))

    def _move(self, name: str, before: Schedule.State, after: Schedule.State) -> Schedule:
        schedule = self._known(name)
        if schedule.state != before:
            raise ApiError(400, f"schedule {name} is {schedule.state.name}, not {before.name}")
        schedule.state = after
        return schedule

    def _known(self, name: str) -> Schedule:
        if name not in self.schedules:
            raise ApiError(404, f"The Schedule does not exist: {name}")
        return self.schedules[name]

    def _check(self, schedule: Schedule, *, new: bool = True) -> None:
        if new:
            refuse_output_only(schedule, OUTPUT_ONLY)
        if missing := [field for field in REQUIRED if field not in fields_of(schedule)]:
            raise ApiError(400, f"Required field {missing[0]} is missing")
        check_display_name(schedule.display_name)
        match = CRON.fullmatch(schedule.cron)
        if not match or (match[1] and match[1] not in zoneinfo.available_timezones()):
            raise ApiError(400, f"cron: {schedule.cron!r} is not a cron line")
        request = schedule.create_pipeline_job_request
        if request.parent != self._parent:
            raise ApiError(400, f"create_pipeline_job_request.parent is {request.parent!r}, not {self._parent!r}")
        counts = (schedule.max_run_count or 0, schedule.max_concurrent_active_run_count or 0)
        if min(counts) < 0 or schedule.max_concurrent_run_count < 1:
            raise ApiError(400, "max_run_count and the limits of concurrent runs count runs")
        if schedule.end_time and schedule.start_time and schedule.end_time <= schedule.start_time:
            raise ApiError(400, "end_time is not after start_time")
        if request.pipeline_job_id:
            raise ApiError(400, "create_pipeline_job_request.pipeline_job_id must not be set in a schedule")
        self._check_job(request.pipeline_job)

    def _plan_next(self, schedule: Schedule) -> None:
        match = CRON.fullmatch(schedule.cron)
        assert match
        schedule.next_run_time = next(starts_after(match[2], match[1] or "UTC", dt.datetime.now(dt.UTC)), None)


def _snake(path: str) -> str:
    return re.sub(r"([A-Z])", lambda match: "_" + match[1].lower(), path)
