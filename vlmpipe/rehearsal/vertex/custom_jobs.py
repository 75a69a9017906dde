"""Custom jobs that pipelines start in the Vertex AI stand-in. A client can only read them."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass

from google.cloud.aiplatform_v1 import types as api
from google.rpc import status_pb2

from vlmpipe.rehearsal.http_server import ApiError
from vlmpipe.rehearsal.vertex.messages import Call, Json, as_dict

EPOCH = dt.datetime(2026, 11, 22, tzinfo=dt.UTC)


@dataclass
class Step:
    """A job's next state; of one that fails, the code and the text of its error."""

    state: str
    code: int = 0
    message: str = ""


class CustomJobs:
    """State in memory. `now` is the clock, in Unix seconds."""

    def __init__(self, parent: str) -> None:
        self.jobs: dict[str, api.CustomJob] = {}
        self.now = EPOCH.timestamp()
        self._parent = parent

    def answer(self, call: Call) -> Json:
        return call.route({("GET", True, ""): lambda: as_dict(self.known(call.name))})

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
        if step.state not in ("QUEUED", "PENDING", "RUNNING"):
            job.end_time = self.moment()
        if step.message:
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
