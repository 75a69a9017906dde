"""States that a pipeline job goes through in the Vertex AI stand-in, and what its machines print.

A job does nothing by itself: a script gives it moves, and makes one of them each time that a client asks for the job.
So nothing waits, and the state between two moves is exact. A move that the service could not make is an AssertionError.
"""

from __future__ import annotations

import datetime as dt
import json
import re
from dataclasses import dataclass, field
from typing import Any

from google.cloud.aiplatform_v1.types import PipelineJob, PipelineState, PipelineTaskDetail
from google.protobuf import json_format
from google.rpc import code_pb2, status_pb2

from vlmpipe.rehearsal.http_server import ApiError
from vlmpipe.rehearsal.vertex.custom_jobs import CustomJobs, Step
from vlmpipe.rehearsal.vertex.messages import Call, Json

JOB_STEPS = ("cache-features", "train", "evaluate", "benchmark")
OVER = ("SUCCEEDED", "FAILED", "CANCELLED")
MOVES = {  # from -> to
    "QUEUED": {"PENDING", "RUNNING", "CANCELLING", "FAILED"},
    "PENDING": {"RUNNING", "CANCELLING", "FAILED"},
    "RUNNING": {"RUNNING", "SUCCEEDED", "FAILED", "CANCELLING"},
    "CANCELLING": {"CANCELLED", "SUCCEEDED", "FAILED"},
}
TASK_MOVES = {
    "": {"PENDING", "RUNNING", "NOT_TRIGGERED", "SKIPPED"},
    "PENDING": {"RUNNING", "CANCELLED", "FAILED", "NOT_TRIGGERED"},
    "RUNNING": {"SUCCEEDED", "FAILED", "CANCELLED"},
}
ORDERS = ("timestamp asc", "timestamp desc")
LOG_FIELDS = {"resourceNames", "filter", "orderBy", "pageSize", "pageToken"}
LOG_FILTER = re.compile(
    r'resource\.type="ml_job" AND resource\.labels\.job_id=\(("[0-9]+"(?: OR "[0-9]+")*)\)'
    r'(?: AND timestamp>="([0-9T:Z.-]+)")?'
)
LOG_PAGE = 3  # small, so that paging is met


@dataclass
class Move:
    """The job's next moment: new states of its tasks, its own state, the error of what failed in it.

    `custom_job` is the last state of the custom job that a job step started, where it is not the task's own: the
    service says of the task only that its container failed.
    """

    tasks: dict[str, str] = field(default_factory=dict)
    job: str = "RUNNING"
    error: str = ""
    later_s: float = 10.0
    custom_job: Step | None = None


class ScriptedRuns:
    """The moves of each job that are still to come, and the log."""

    def __init__(self, project: str, custom_jobs: CustomJobs) -> None:
        self._project, self._custom_jobs = project, custom_jobs
        self.moves: dict[str, list[Move]] = {}
        self.entries: list[dict[str, Any]] = []
        self._numbers = 0

    def begin(self, job: PipelineJob) -> None:
        """Fields that the service fills in when a job is created."""
        job.state = PipelineState.PIPELINE_STATE_PENDING
        job.create_time = job.update_time = dt.datetime.now(dt.UTC)

    def advance(self, job: PipelineJob) -> None:
        """Make the job's next move, if there is one."""
        moves = self.moves.get(job.name.rpartition("/")[2]) or []
        if moves:
            self._make(job, moves.pop(0))
        elif _state(job) == "CANCELLING":
            running = {task.task_name: "CANCELLED" for task in job.job_detail.task_details if _is_open(task)}
            self._make(job, Move(running, "CANCELLED", "The pipeline was cancelled by a user."))

    def cancel(self, job: PipelineJob, call: Call) -> Json:
        """pipelineJobs.cancel."""
        call.require_fields()
        if _state(job) not in ("QUEUED", "PENDING", "RUNNING"):
            raise ApiError(400, f"The PipelineJob is in state {_state(job)} and cannot be cancelled.")
        job.state = PipelineState.PIPELINE_STATE_CANCELLING
        self.moves.pop(job.name.rpartition("/")[2], None)  # what was still to come does not happen
        return {}

    def list_entries(self, body: bytes) -> Json:
        """entries.list of Cloud Logging, with the one filter that this fake knows."""
        request = json.loads(body)
        if unknown := request.keys() - LOG_FIELDS:
            raise ApiError(400, f"Invalid JSON payload received. Unknown name {sorted(unknown)}")
        if request.get("resourceNames") != [f"projects/{self._project}"]:
            raise ApiError(403, f"Permission denied for {request.get('resourceNames')}")
        if not 0 < request.get("pageSize", 50) <= 1000:
            raise ApiError(400, "pageSize must be between 1 and 1000")
        if request.get("orderBy", ORDERS[0]) not in ORDERS:
            raise ApiError(400, f"orderBy must be one of {ORDERS}")
        match = LOG_FILTER.fullmatch(request.get("filter", ""))
        if not match:
            raise ApiError(501, f"a filter that this fake does not know: {request.get('filter')}")
        jobs, since = re.findall("[0-9]+", match[1]), match[2] or ""
        matching = [entry for entry in self.entries if entry["resource"]["labels"]["job_id"] in jobs]
        matching = [entry for entry in matching if entry["timestamp"] >= since]
        if request.get("orderBy") == ORDERS[1]:
            matching.reverse()
        start = int(request.get("pageToken") or 0)
        answer: Json = {"entries": matching[start : start + LOG_PAGE]}
        if start + LOG_PAGE < len(matching):
            answer["nextPageToken"] = str(start + LOG_PAGE)
        return answer

    def _make(self, job: PipelineJob, move: Move) -> None:
        assert move.job in MOVES.get(_state(job), ()), f"a job does not go from {_state(job)} to {move.job}"
        now = max(job.update_time, job.create_time) + dt.timedelta(seconds=move.later_s)
        known = tasks_of(job)
        for name, state in move.tasks.items():
            assert name in known, f"the pipeline has no task {name}: {sorted(known)}"
            self._move_task(job, name, state, now, move)
        job.state = PipelineState[f"PIPELINE_STATE_{move.job}"]
        job.update_time = now
        job.start_time = job.start_time or now
        if move.job in OVER:
            assert not any(map(_is_open, job.job_detail.task_details)), "a job that is over has no running task"
            job.end_time = now
        if move.job in ("FAILED", "CANCELLED"):
            code = code_pb2.CANCELLED if move.job == "CANCELLED" else code_pb2.FAILED_PRECONDITION
            job.error = status_pb2.Status(code=code, message=move.error)

    def _move_task(self, job: PipelineJob, name: str, state: str, now: dt.datetime, move: Move) -> None:
        details = [task for task in job.job_detail.task_details if task.task_name == name]
        before = details[0].state.name if details else ""
        assert state in TASK_MOVES.get(before, ()), f"task {name} does not go from {before or 'nothing'} to {state}"
        if not details:
            job.job_detail.task_details.append(PipelineTaskDetail(task_name=name, create_time=now))
        (task,) = (task for task in job.job_detail.task_details if task.task_name == name)
        task.state = PipelineTaskDetail.State[state]
        if state == "RUNNING":
            task.start_time = now
            parent = job.name.rpartition("/pipelineJobs/")[0]
            task.executor_detail.container_detail.main_job = self._begin_job(parent)
            if name.endswith(JOB_STEPS) and "collect-" not in name:  # a stage's has its name in front
                resource = f"https://us-central1-aiplatform.googleapis.com/v1/{self._begin_job(parent)}"
                resources = json.dumps({"resources": [{"resourceType": "CustomJob", "resourceUri": resource}]})
                task.execution.metadata = {"output:gcp_resources": resources}
        if state in ("SUCCEEDED", "FAILED", "CANCELLED"):
            task.end_time = now
            error = Step(state, code_pb2.FAILED_PRECONDITION, move.error if state == "FAILED" else "")
            names = re.findall(r"projects/[^\s\"']*/customJobs/[0-9]+", str(PipelineTaskDetail.pb(task)))
            for name in names:
                self._custom_jobs.end(name, error if name == names[0] else move.custom_job or error)
        if state == "FAILED":
            task.error = status_pb2.Status(code=code_pb2.FAILED_PRECONDITION, message=move.error)

    def _begin_job(self, parent: str) -> str:
        self._numbers += 1
        name = f"{parent}/customJobs/{7000 + self._numbers}"
        self._custom_jobs.begin(name)
        return name


def _state(job: PipelineJob) -> str:
    return str(job.state.name).removeprefix("PIPELINE_STATE_")


def _is_open(task: PipelineTaskDetail) -> bool:
    return task.state.name in ("PENDING", "RUNNING")


def tasks_of(job: PipelineJob) -> set[str]:
    """The names of all tasks in the job's pipeline, groups such as conditions too."""
    spec = json_format.MessageToDict(PipelineJob.pb(job))["pipelineSpec"]
    dags = [spec["root"]["dag"], *(component["dag"] for component in spec["components"].values() if "dag" in component)]
    return {name for dag in dags for name in dag["tasks"]}


BEGUN = Move({"resolve-run": "RUNNING"})


TRAINING = [
    BEGUN,
    Move({"resolve-run": "SUCCEEDED", "prepare-data": "RUNNING"}),
    Move({"prepare-data": "SUCCEEDED", "reuse-features": "RUNNING", "cache-features": "NOT_TRIGGERED"}),
    Move({"reuse-features": "SUCCEEDED", "train": "RUNNING"}, later_s=60),
]


DONE = [
    Move({"train": "SUCCEEDED", "sync-checkpoint": "RUNNING"}, later_s=3600),
    Move({"sync-checkpoint": "SUCCEEDED", "evaluate": "RUNNING"}),
    Move({"evaluate": "SUCCEEDED", "decide": "RUNNING"}, later_s=600),
    Move({"decide": "SUCCEEDED", "notify": "RUNNING"}),
    Move({"notify": "SUCCEEDED"}, "SUCCEEDED"),
]
