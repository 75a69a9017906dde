"""Custom jobs that a client creates in the Vertex AI fake, which go through the states that a test scripts.

A job takes its next state each time that it is asked for, and the clock moves on by the seconds that somebody sleeps:
nothing waits, and results are exact.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TypeVar

from google.cloud.aiplatform_v1 import types as api

from vlmpipe.rehearsal.http_server import ApiError
from vlmpipe.rehearsal.vertex.custom_jobs import CustomJobs, Step, state_of
from vlmpipe.rehearsal.vertex.messages import Call, Json, as_dict, refuse_output_only

OPEN = ("QUEUED", "PENDING", "RUNNING")
OUTPUT_ONLY = {"name", "state", "create_time", "start_time", "end_time", "update_time", "error", "web_access_uris"}
LABEL_FILTER = re.compile(r"labels\.([a-z0-9_-]+)=([a-z0-9_-]+)")

Labelled = TypeVar("Labelled", api.CustomJob, api.HyperparameterTuningJob)


class ScriptedCustomJobs(CustomJobs):
    """State in memory.

    Attributes:
        scripts: of each job in the order of their creation, its states one request after another; the last one stays.
        stockouts: creations to refuse for want of quota before the next one that passes.
    """

    def __init__(self, parent: str) -> None:
        super().__init__(parent)
        self.scripts: list[list[Step]] = []
        self.stockouts = 0
        self._script_of: dict[str, list[Step]] = {}

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def answer(self, call: Call) -> Json:
        return call.route(
            {
                ("POST", False, ""): lambda: self._create(call),
                ("GET", False, ""): lambda: {
                    "customJobs": [as_dict(job) for job in labelled(self.jobs.values(), call)]
                },
                ("GET", True, ""): lambda: as_dict(self._advanced(self.known(call.name))),
                ("POST", True, "cancel"): lambda: self._cancel(call.name),
            }
        )

    def _create(self, call: Call) -> Json:
        job = call.parse(api.CustomJob)
        self._check(job)
        if self.stockouts:
            self.stockouts -= 1
            raise ApiError(429, "The following quota metrics exceed quota limits: custom_model_training_preemptible")
        job.name = f"{self._parent}/customJobs/{9001 + len(self.jobs)}"
        job.create_time = job.update_time = self.moment()
        job.state = api.JobState.JOB_STATE_PENDING
        self._script_of[job.name] = self.scripts.pop(0) if self.scripts else [Step("PENDING")]
        self.jobs[job.name] = job
        return as_dict(job)

    def _check(self, job: api.CustomJob) -> None:
        refuse_output_only(job, OUTPUT_ONLY)
        if not job.display_name or not job.job_spec.worker_pool_specs:
            raise ApiError(400, "Required field display_name or job_spec.worker_pool_specs is missing")
        scheduling, pools = job.job_spec.scheduling, job.job_spec.worker_pool_specs
        flex_start = scheduling.strategy == api.Scheduling.Strategy.FLEX_START
        if scheduling.max_wait_duration and not flex_start:
            raise ApiError(400, "max_wait_duration is only for FLEX_START")
        machines = {(pool.machine_spec.machine_type, pool.machine_spec.accelerator_count) for pool in pools}
        if flex_start and (len(machines) > 1 or not pools[0].machine_spec.accelerator_count):
            raise ApiError(400, "FLEX_START needs the same GPU machines in all pools")
        if pools[0].replica_count != 1:
            raise ApiError(400, "worker pool 0 has exactly one replica")

    def _advanced(self, job: api.CustomJob) -> api.CustomJob:
        script = self._script_of.get(job.name)
        if script and state_of(job) in OPEN:
            self.move(job, script.pop(0) if len(script) > 1 else script[0])
        return job

    def _cancel(self, name: str) -> Json:
        job = self.known(name)
        if state_of(job) not in OPEN:
            raise ApiError(400, f"The CustomJob is in state {job.state.name} and cannot be cancelled.")
        self._script_of[name] = [Step("CANCELLED", 1, "CANCELED")]
        return {}


def labelled(jobs: Iterable[Labelled], call: Call) -> list[Labelled]:
    """The jobs with the label that the listing's filter asks for."""
    wanted = call.query.get("filter", "")
    if not (match := LABEL_FILTER.fullmatch(wanted)):
        raise ApiError(501, f"a filter that this fake does not know: {wanted}")
    return [job for job in jobs if job.labels.get(match[1]) == match[2]]
