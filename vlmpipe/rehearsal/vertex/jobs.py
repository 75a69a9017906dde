"""Custom jobs of the stand-in for Vertex AI: strict about their messages, moved along by a course that a test gives.

A job makes one move each time somebody asks for it, and the floor's clock goes on by the seconds that somebody sleeps,
so nothing waits and what is seen is exact.
"""

from __future__ import annotations

import datetime as dt
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from google.cloud.aiplatform_v1 import types as api
from google.protobuf import json_format
from google.rpc import status_pb2

OPEN = ("QUEUED", "PENDING", "RUNNING")
OUTPUT_ONLY = {"name", "state", "create_time", "start_time", "end_time", "update_time", "error", "web_access_uris"}
LABEL_FILTER = re.compile(r"labels\.([a-z0-9_-]+)=([a-z0-9_-]+)")
EPOCH = dt.datetime(2026, 11, 22, tzinfo=dt.UTC)

Refuse = Callable[[int, str], Exception]


@dataclass
class Step:
    """A job's next state; of one that fails, the code and the text of its error."""

    state: str
    code: int = 0
    message: str = ""


class JobFloor:
    """State in memory.

    Attributes:
        courses: of each job in the order of their creation, its states one look after another; the last one stays.
        stockouts: creations to refuse for want of quota before the next one that passes.
    """

    def __init__(self, parent: str, refuse: Refuse) -> None:
        self.jobs: dict[str, api.CustomJob] = {}
        self.courses: list[list[Step]] = []
        self.stockouts = 0
        self.now = EPOCH.timestamp()
        self._parent, self._refuse = parent, refuse
        self._course_of: dict[str, list[Step]] = {}

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def answer(
        self, method: str, kind: str, number: str, verb: str | None, query: dict[str, str], body: bytes
    ) -> dict[str, Any]:
        name = f"{self._parent}/{kind}/{number}"
        routes: dict[tuple[str, bool, str | None], Callable[[], dict[str, Any]]] = {
            ("POST", False, None): lambda: self._create(body),
            ("GET", False, None): lambda: self._list(query.get("filter", "")),
            ("GET", True, None): lambda: self._get(name),
            ("POST", True, ":cancel"): lambda: self._cancel(name),
        }
        if (route := routes.get((method, bool(number), verb))) is None:
            raise self._refuse(501, f"no such route in this fake: {method} {kind} {verb}")
        return route()

    def begin(self, name: str) -> None:
        """A job that the pipeline service started for a task: it has its machines, and moves when `end` says so."""
        state = api.JobState.JOB_STATE_RUNNING
        moment = self._phase()
        self.jobs[name] = api.CustomJob(name=name, state=state, create_time=moment, start_time=moment)
        self._course_of[name] = []

    def end(self, name: str, step: Step) -> None:
        """Such a job's last state."""
        self._move(self.jobs[name], step)

    def _create(self, body: bytes) -> dict[str, Any]:
        job = api.CustomJob()
        try:
            json_format.Parse(body, api.CustomJob.pb(job))
        except json_format.ParseError as error:
            raise self._refuse(400, f"Invalid JSON payload received. {error}") from None
        self._check(job)
        if self.stockouts:
            self.stockouts -= 1
            raise self._refuse(
                429, "The following quota metrics exceed quota limits: custom_model_training_preemptible"
            )
        job.name = f"{self._parent}/customJobs/{9001 + len(self.jobs)}"
        job.create_time = job.update_time = self._phase()
        job.state = api.JobState.JOB_STATE_PENDING
        self._course_of[job.name] = self.courses.pop(0) if self.courses else [Step("PENDING")]
        self.jobs[job.name] = job
        return _as_dict(job)

    def _check(self, job: api.CustomJob) -> None:
        fields = {descriptor.name for descriptor, _ in api.CustomJob.pb(job).ListFields()}
        if given := fields & OUTPUT_ONLY:
            raise self._refuse(400, f"output-only fields are set: {sorted(given)}")
        if not job.display_name or not job.job_spec.worker_pool_specs:
            raise self._refuse(400, "Required field display_name or job_spec.worker_pool_specs is missing")
        scheduling, pools = job.job_spec.scheduling, job.job_spec.worker_pool_specs
        flex_start = scheduling.strategy == api.Scheduling.Strategy.FLEX_START
        if scheduling.max_wait_duration and not flex_start:
            raise self._refuse(400, "max_wait_duration is only for FLEX_START")
        machines = {(pool.machine_spec.machine_type, pool.machine_spec.accelerator_count) for pool in pools}
        if flex_start and (len(machines) > 1 or not pools[0].machine_spec.accelerator_count):
            raise self._refuse(400, "FLEX_START needs the same GPU machines in all pools")
        if pools[0].replica_count != 1:
            raise self._refuse(400, "worker pool 0 has exactly one replica")

    def _list(self, wanted: str) -> dict[str, Any]:
        if not (match := LABEL_FILTER.fullmatch(wanted)):
            raise self._refuse(501, f"a filter that this fake does not know: {wanted}")
        found = [job for job in self.jobs.values() if job.labels.get(match[1]) == match[2]]
        return {"customJobs": [_as_dict(job) for job in found]}

    def _get(self, name: str) -> dict[str, Any]:
        job = self._known(name)
        course = self._course_of[name]
        if course and job.state.name.removeprefix("JOB_STATE_") in OPEN:
            step = course.pop(0) if len(course) > 1 else course[0]
            self._move(job, step)
        return _as_dict(job)

    def _move(self, job: api.CustomJob, step: Step) -> None:
        job.state = api.JobState[f"JOB_STATE_{step.state}"]
        job.update_time = self._phase()
        if step.state == "RUNNING" and not job.start_time:
            job.start_time = self._phase()
        if step.state not in OPEN:
            job.end_time = self._phase()
        if step.message:
            job.error = status_pb2.Status(code=step.code, message=step.message)

    def _cancel(self, name: str) -> dict[str, Any]:
        job = self._known(name)
        if job.state.name.removeprefix("JOB_STATE_") not in OPEN:
            raise self._refuse(400, f"The CustomJob is in state {job.state.name} and cannot be cancelled.")
        self._course_of[name] = [Step("CANCELLED", 1, "CANCELED")]
        return {}

    def _known(self, name: str) -> api.CustomJob:
        if name not in self.jobs:
            raise self._refuse(404, f"The CustomJob does not exist: {name}")
        return self.jobs[name]

    def _phase(self) -> dt.datetime:
        return dt.datetime.fromtimestamp(self.now, dt.UTC)


def _as_dict(job: api.CustomJob) -> dict[str, Any]:
    return dict(json.loads(json_format.MessageToJson(api.CustomJob.pb(job))))
