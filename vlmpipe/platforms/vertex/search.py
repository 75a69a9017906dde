"""A search by Vertex AI's HyperparameterTuningJob."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vlmpipe.google_cloud.client import Place
from vlmpipe.runs.searches import SearchStatus, Trial, ranked
from vlmpipe.runs.submitted import submitted_record

if TYPE_CHECKING:
    from google.cloud.aiplatform_v1 import types as api

_RESOURCE = re.compile(r"projects/([^/]+)/locations/([^/]+)/hyperparameterTuningJobs/([^/?]+)")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
OUTCOMES = {
    "QUEUED": "waiting", "PENDING": "waiting", "RUNNING": "running", "CANCELLING": "stopping", "PAUSED": "paused",
    "SUCCEEDED": "done", "PARTIALLY_SUCCEEDED": "done", "FAILED": "failed", "EXPIRED": "failed", "CANCELLED": "stopped",
}  # fmt: skip
TRIAL_STATES = {
    "REQUESTED": "waiting", "ACTIVE": "running", "STOPPING": "running", "SUCCEEDED": "done", "INFEASIBLE": "failed",
}  # fmt: skip


@dataclass(frozen=True)
class VertexSearch:
    """A HyperparameterTuningJob. Errors of Google's client become UserErrors."""

    name: str
    place: Place
    number: str

    asks = "Vertex AI"

    @property
    def resource_name(self) -> str:
        return f"{self.place.parent}/hyperparameterTuningJobs/{self.number}"

    def status(self) -> SearchStatus:
        return status_of_job(self._get(), self.name, self.place)

    def cancel(self) -> bool:
        """Ask the service to stop the search and its trials; see `cancel_job`."""
        from vlmpipe.google_cloud.client import job_client, translate_errors
        from vlmpipe.google_cloud.retries import send_request
        from vlmpipe.platforms.vertex.runs.client import USER, cancel_job

        client = job_client(self.place.location)

        def send() -> None:
            with translate_errors(self.place, role=USER, what="tuning job"):
                send_request(client.cancel_hyperparameter_tuning_job, name=self.resource_name)

        return cancel_job(f"search {self.name}", self.name, lambda: _state(self._get()), send)

    def _get(self) -> api.HyperparameterTuningJob:
        from vlmpipe.google_cloud.client import job_client, translate_errors
        from vlmpipe.google_cloud.retries import send_request
        from vlmpipe.platforms.vertex.runs.client import VIEWER

        client = job_client(self.place.location)
        with translate_errors(self.place, role=VIEWER, what="tuning job"):
            return send_request(client.get_hyperparameter_tuning_job, name=self.resource_name)


def _state(job: api.HyperparameterTuningJob) -> str:
    return str(job.state.name).removeprefix("JOB_STATE_")


def search_on_vertex(name: str) -> VertexSearch | None:
    """The search called `name`: submitted from this folder, or a tuning job's resource name. None for other names."""
    record = submitted_record(name) if _NAME.fullmatch(name) else {}
    match = _RESOURCE.fullmatch(str(record.get("resource_name") or name))
    return VertexSearch(name, Place(match[1], match[2]), match[3]) if match else None


def status_of_job(job: api.HyperparameterTuningJob, name: str, place: Place) -> SearchStatus:
    """The search from the service's answer about its job."""
    requested = job.study_spec.metrics[0]
    number = job.name.rpartition("/")[2]
    return SearchStatus(
        search_id=name if "/" not in name else job.display_name,
        uri=job.trial_job_spec.base_output_directory.output_uri_prefix,
        outcome=OUTCOMES.get(_state(job), "running"),
        metric=requested.metric_id,
        goal=requested.goal.name,
        num_trials=job.max_trial_count,
        trials=tuple(ranked((_trial(trial, requested.metric_id) for trial in job.trials), requested.goal.name)),
        error=job.error.message,
        resource_name=job.name,
        console_url=place.console_url(number, in_pipelines=False),
    )


def _trial(trial: api.Trial, metric: str) -> Trial:
    result = {metric.metric_id: metric.value for metric in trial.final_measurement.metrics}
    state = TRIAL_STATES.get(trial.state.name, "running")
    values = {parameter.parameter_id: parameter.value for parameter in trial.parameters}
    end_s = trial.end_time.timestamp() if trial.end_time else time.time()
    elapsed_s = max(0.0, end_s - trial.start_time.timestamp()) if trial.start_time else 0.0
    return Trial(int(trial.id), values, result.get(metric), trial.infeasible_reason, state, elapsed_s)
