"""The schedules of the stand-in for Vertex AI: strict about fields, masks, filters and states."""

from __future__ import annotations

import datetime as dt
import json
import re
import zoneinfo
from collections.abc import Callable
from typing import Any

from google.cloud.aiplatform_v1.types import PipelineJob, Schedule
from google.longrunning.operations_pb2 import Operation
from google.protobuf import json_format
from google.protobuf.empty_pb2 import Empty

from vlmpipe.planner.cost.cron import starts_after

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

Refuse = Callable[[int, str], Exception]
CheckJob = Callable[[PipelineJob], None]


class ScheduleBook:
    """State in memory. `refuse` makes the error of a status and a text, `check_job` raises it for a bad job."""

    def __init__(self, parent: str, check_job: CheckJob, refuse: Refuse) -> None:
        self.schedules: dict[str, Schedule] = {}
        self._parent, self._check_job, self._refuse = parent, check_job, refuse
        self._made = 0

    def create(self, parent: str, body: bytes) -> dict[str, Any]:
        schedule = self._parsed(body)
        self._check(schedule, parent)
        self._made += 1
        schedule.name = f"{parent}/schedules/{1000 + self._made}"
        schedule.state = Schedule.State.ACTIVE
        schedule.create_time = schedule.update_time = dt.datetime.now(dt.UTC)
        schedule.start_time = schedule.start_time or schedule.create_time
        self._plan_next(schedule)
        self.schedules[schedule.name] = schedule
        return _as_dict(schedule)

    def get(self, name: str) -> dict[str, Any]:
        return _as_dict(self._known(name))

    def list(self, query: dict[str, str]) -> dict[str, Any]:
        wanted = query.get("filter", "")
        match = FILTER.fullmatch(wanted)
        if wanted and not match:
            raise self._refuse(501, f"a filter that this fake does not know: {wanted}")
        found = [one for one in self.schedules.values() if not match or one.display_name == match[1]]
        start = int(query.get("pageToken") or 0)
        answer: dict[str, Any] = {"schedules": [_as_dict(one) for one in found[start : start + PAGE]]}
        if start + PAGE < len(found):
            answer["nextPageToken"] = str(start + PAGE)
        return answer

    def update(self, name: str, mask: str, body: bytes) -> dict[str, Any]:
        live, given = self._known(name), self._parsed(body)
        if live.state == Schedule.State.COMPLETED:
            raise self._refuse(400, f"schedule {name} is COMPLETED and cannot be updated")
        paths = {_snake(path) for path in mask.split(",") if path}
        if not paths or not paths <= UPDATABLE:
            raise self._refuse(400, f"update_mask: {sorted(paths - UPDATABLE) or 'empty'}")
        changed = Schedule(live)
        for path in paths:
            setattr(changed, path, getattr(given, path))
        self._check(changed, self._parent, new=False)
        changed.update_time = dt.datetime.now(dt.UTC)
        self._plan_next(changed)
        self.schedules[name] = changed
        return _as_dict(changed)

    def pause(self, name: str, body: bytes) -> dict[str, Any]:
        self._empty(body, known=())
        self._move(name, Schedule.State.ACTIVE, Schedule.State.PAUSED)
        return {}

    def resume(self, name: str, body: bytes) -> dict[str, Any]:
        content = self._empty(body, known=("catchUp",))
        schedule = self._move(name, Schedule.State.PAUSED, Schedule.State.ACTIVE)
        schedule.catch_up = bool(content.get("catchUp", False))
        return {}

    def delete(self, name: str) -> dict[str, Any]:
        del self.schedules[self._known(name).name]
        operation = Operation(name=f"{name}/operations/1", done=True)
        operation.response.Pack(Empty())
        return dict(json_format.MessageToDict(operation))

    def _move(self, name: str, before: Schedule.State, after: Schedule.State) -> Schedule:
        schedule = self._known(name)
        if schedule.state != before:
            raise self._refuse(400, f"schedule {name} is {schedule.state.name}, not {before.name}")
        schedule.state = after
        return schedule

    def _known(self, name: str) -> Schedule:
        if name not in self.schedules:
            raise self._refuse(404, f"The Schedule does not exist: {name}")
        return self.schedules[name]

    def _parsed(self, body: bytes) -> Schedule:
        schedule = Schedule()
        try:
            json_format.Parse(body, Schedule.pb(schedule))
        except json_format.ParseError as error:
            raise self._refuse(400, f"Invalid JSON payload received. {error}") from None
        return schedule

    def _empty(self, body: bytes, known: tuple[str, ...]) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(body or b"{}")
        if unknown := content.keys() - {"name", *known}:
            raise self._refuse(400, f"Invalid JSON payload received. Unknown name {sorted(unknown)}")
        return content

    def _check(self, schedule: Schedule, parent: str, *, new: bool = True) -> None:
        fields = {descriptor.name for descriptor, _ in Schedule.pb(schedule).ListFields()}
        if new and (given := fields & OUTPUT_ONLY):
            raise self._refuse(400, f"output-only fields are set: {sorted(given)}")
        if missing := [field for field in REQUIRED if field not in fields]:
            raise self._refuse(400, f"Required field {missing[0]} is missing")
        match = CRON.fullmatch(schedule.cron)
        if not match or (match[1] and match[1] not in zoneinfo.available_timezones()):
            raise self._refuse(400, f"cron: {schedule.cron!r} is not a cron line")
        request = schedule.create_pipeline_job_request
        if request.parent != parent:
            raise self._refuse(400, f"create_pipeline_job_request.parent is {request.parent!r}, not {parent!r}")
        if request.pipeline_job_id:
            raise self._refuse(400, "create_pipeline_job_request.pipeline_job_id must not be set in a schedule")
        self._check_job(request.pipeline_job)

    def _plan_next(self, schedule: Schedule) -> None:
        match = CRON.fullmatch(schedule.cron)
        assert match
        schedule.next_run_time = next(starts_after(match[2], match[1] or "UTC", dt.datetime.now(dt.UTC)))


def _as_dict(schedule: Schedule) -> dict[str, Any]:
    return dict(json_format.MessageToDict(Schedule.pb(schedule)))


def _snake(path: str) -> str:
    return re.sub(r"([A-Z])", lambda match: "_" + match[1].lower(), path)
