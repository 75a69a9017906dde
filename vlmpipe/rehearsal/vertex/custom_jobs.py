"""Custom jobs in the Vertex AI stand-in: those that pipelines start, and those that a client creates."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from google.cloud.aiplatform_v1 import types as api
from google.rpc import status_pb2

from vlmpipe.rehearsal.http_server import ApiError
from vlmpipe.rehearsal.vertex.messages import Call, Json, as_dict, refuse_output_only
from vlmpipe.rehearsal.vertex.rules import (
    check_custom_job_spec,
    check_display_name,
    check_encryption_key,
    check_labels,
)

NEXT = {"PENDING": "RUNNING", "RUNNING": "SUCCEEDED", "CANCELLING": "CANCELLED"}
OPEN = ("QUEUED", "PENDING", "RUNNING")
OUTPUT_ONLY = {
    "name", "state", "create_time", "start_time", "end_time", "update_time", "error", "web_access_uris",
    "satisfies_pzs", "satisfies_pzi",
}  # fmt: skip
# States whose entry sets end_time, and states of a job with an error (CustomJob, v1).
ENDS, WITH_ERROR = ("SUCCEEDED", "FAILED", "CANCELLED"), ("FAILED", "CANCELLED")
PAGE = 2  # small, so that paging is met
LABEL_FILTER = re.compile(r'labels\.([a-z0-9_-]+)=([a-z0-9_-]+)(?: AND state="JOB_STATE_([A-Z]+)")?')

Labelled = TypeVar("Labelled", api.CustomJob, api.HyperparameterTuningJob)

EPOCH = dt.datetime(2026, 11, 22, tzinfo=dt.UTC)


@dataclass
class Step:
    """A job's next state; of one that fails, the code and the text of its error."""

    state: str
    code: int = 0
    message: str = ""


CANCELLED = Step("CANCELLED", 1, "CANCELED")


class CustomJobs:
    """State in memory. `now` is the clock, in Unix seconds."""

    def __init__(self, parent: str) -> None:
        self.jobs: dict[str, api.CustomJob] = {}
        self.now = EPOCH.timestamp()
        self._parent = parent
        self._created: set[str] = set()

    def answer(self, call: Call) -> Json:
        return call.route(self.routes(call))

    def routes(self, call: Call) -> dict[tuple[str, bool, str], Callable[[], Json]]:
        """Requests that a client may send."""
        return {
            ("POST", False, ""): lambda: self.create(call),
            ("GET", False, ""): lambda: call.page(self.listed(call), PAGE),
            ("GET", True, ""): lambda: as_dict(self.asked(call.name)),
            ("POST", True, "cancel"): lambda: self.cancel(call.name),
        }

    def create(self, call: Call) -> Json:
        """customJobs.create. Raises ApiError for what the real service refuses."""
        job = call.parse(api.CustomJob)
        check_custom_job(job, call.parent.rpartition("/")[2])
        job.name = f"{call.parent}/customJobs/{9001 + len(self.jobs)}"
        job.create_time = job.update_time = self.moment()
        job.state = api.JobState.JOB_STATE_PENDING
        self.jobs[job.name] = job
        self._created.add(job.name)
        return as_dict(job)

    def listed(self, call: Call) -> list[api.CustomJob]:
        """The jobs of the call's region that its filter asks for."""
        return labelled((job for name, job in self.jobs.items() if name.startswith(f"{call.parent}/")), call)

    def asked(self, name: str) -> api.CustomJob:
        """The job, one state further each time if a client created it: others follow their pipeline."""
        job = self.known(name)
        if name in self._created and (following := NEXT.get(state_of(job))):
            self.move(job, CANCELLED if following == "CANCELLED" else Step(following))
        return job

    def cancel(self, name: str) -> Json:
        """customJobs.cancel, which only begins the cancellation; of a job that follows its pipeline it is done."""
        job = self.known(name)
        if state_of(job) not in OPEN:
            raise ApiError(400, f"The CustomJob is in state {job.state.name} and cannot be cancelled.")
        self.move(job, Step("CANCELLING") if name in self._created else CANCELLED)
        return {}

    def begin(self, name: str) -> None:
        """Start the job of a pipeline's task. It has its machines at once, and runs until `end`."""
        moment = self.moment()
        state = api.JobState.JOB_STATE_RUNNING
        self.jobs[name] = api.CustomJob(name=name, state=state, create_time=moment, start_time=moment)

    def end(self, name: str, step: Step) -> None:
        """Set such a job's last state."""
        self.move(self.jobs[name], step)

    def move(self, job: api.CustomJob, step: Step) -> None:
        """Set the job's next state."""
        job.state = api.JobState[f"JOB_STATE_{step.state}"]
        job.update_time = self.moment()
        if step.state == "RUNNING" and not job.start_time:
            job.start_time = self.moment()
        if step.state in ENDS:
            job.end_time = self.moment()
        if step.message:
            assert step.state in WITH_ERROR, f"a job that is {step.state} has no error"
            job.error = status_pb2.Status(code=step.code, message=step.message)

    def known(self, name: str) -> api.CustomJob:
        if name not in self.jobs:
            raise ApiError(404, f"The CustomJob does not exist: {name}")
        return self.jobs[name]

    def moment(self) -> dt.datetime:
        return dt.datetime.fromtimestamp(self.now, dt.UTC)


def state_of(job: api.CustomJob | api.HyperparameterTuningJob) -> str:
    """The job's state, such as RUNNING."""
    return str(job.state.name).removeprefix("JOB_STATE_")


def labelled(jobs: Iterable[Labelled], call: Call) -> list[Labelled]:
    """The jobs with the label, and in the state, that the listing's filter asks for."""
    requested = call.query.get("filter", "")
    if not (match := LABEL_FILTER.fullmatch(requested)):
        raise ApiError(501, f"a filter that this fake does not know: {requested}")
    label, value, state = match.groups()
    return [job for job in jobs if job.labels.get(label) == value and state in (None, state_of(job))]


def check_custom_job(job: api.CustomJob, location: str) -> None:
    """Raise ApiError for what the real service refuses in a custom job."""
    refuse_output_only(job, OUTPUT_ONLY)
    check_display_name(job.display_name)
    check_labels(job.labels)
    check_encryption_key(job, location)
    check_custom_job_spec(job.job_spec, location)
    scheduling, pools = job.job_spec.scheduling, job.job_spec.worker_pool_specs
    flex_start = scheduling.strategy == api.Scheduling.Strategy.FLEX_START
    if scheduling.max_wait_duration and not flex_start:
        raise ApiError(400, "max_wait_duration is only for FLEX_START")
    machines = {(pool.machine_spec.machine_type, pool.machine_spec.accelerator_count) for pool in pools}
    if flex_start and (len(machines) > 1 or not pools[0].machine_spec.accelerator_count):
        raise ApiError(400, "FLEX_START needs the same GPU machines in all pools")
    if pools[0].replica_count != 1:
        raise ApiError(400, "worker pool 0 has exactly one replica")
