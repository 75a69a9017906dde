"""Reads and cancels runs on Vertex AI."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from google.api_core import exceptions

from trainer.errors import ConfigError, ExitCode, UserError
from trainer.storage.base import join_uri
from vlmpipe.backends.vertex.client import Place, pipeline_client, translate_errors
from vlmpipe.backends.vertex.pipeline_job import REQUEST_TIMEOUT_S, retrying
from vlmpipe.runs.vertex.names import Address

if TYPE_CHECKING:
    from google.cloud.aiplatform_v1.services.pipeline_service import PipelineServiceClient
    from google.cloud.aiplatform_v1.types import PipelineJob

OVER = ("SUCCEEDED", "FAILED", "CANCELLED")
VIEWER, USER = "roles/aiplatform.viewer", "roles/aiplatform.user"


class Runs:
    """The pipeline jobs of one place. Raises UserError in words for all that Google's client raises."""

    def __init__(self, place: Place, client: PipelineServiceClient | None = None) -> None:
        self._place = place
        self._client = client or pipeline_client(place.location)

    def get(self, address: Address) -> PipelineJob:
        """Raises UserError (exit 66) where there is no run of that name."""
        try:
            with translate_errors(self._place, role=VIEWER):
                return self._get(address)
        except UserError as error:
            said = error.__cause__
            if isinstance(said, exceptions.NotFound) and "location" not in said.message.replace("/locations/", ""):
                raise _not_found(address) from said
            raise

    def cancel(self, address: Address) -> bool:
        """Ask the service to stop the run. False where it is being stopped, or was stopped, already.

        Raises ConfigError for a run that has ended otherwise.
        """
        job = self.get(address)
        if state_of(job) in ("CANCELLING", "CANCELLED"):
            return False
        self._refuse_over(address, job)
        try:
            with translate_errors(self._place, role=USER):
                request = {"name": address.resource_name}
                retrying([], lambda: self._client.cancel_pipeline_job(request, retry=None, timeout=REQUEST_TIMEOUT_S))
        except UserError as error:  # it may have ended, or been cancelled by our own first request, meanwhile
            if not isinstance(error.__cause__, exceptions.BadRequest):
                raise
            job = self.get(address)
            self._refuse_over(address, job)
            if state_of(job) not in ("CANCELLING", "CANCELLED"):
                raise
        return True

    def _get(self, address: Address) -> PipelineJob:
        name = address.resource_name
        return retrying([], lambda: self._client.get_pipeline_job(name=name, retry=None, timeout=REQUEST_TIMEOUT_S))

    def _refuse_over(self, address: Address, job: PipelineJob) -> None:
        if state_of(job) in ("SUCCEEDED", "FAILED"):
            raise ConfigError(
                f"run {address.job_id} is over ({state_of(job).lower()}), so there is nothing to cancel",
                expected="a run that is going on",
                fix=f"vlmpipe status {address.argument}",
            )


def state_of(job: PipelineJob) -> str:
    """QUEUED, PENDING, RUNNING, SUCCEEDED, FAILED, CANCELLING, CANCELLED or PAUSED."""
    return str(job.state.name).removeprefix("PIPELINE_STATE_")


def run_uri_of_job(job: PipelineJob) -> str:
    """The run's folder, from what the job itself was told; empty for a job that is not of vlmpipe."""
    spec, given = job.pipeline_spec or {}, job.runtime_config.parameter_values or {}
    inputs: Any = spec
    for key in ("root", "dag", "tasks", "notify", "inputs", "parameters"):
        inputs = inputs.get(key) or {}
    root_uri = (inputs.get("root_uri") or {}).get("runtimeValue", {}).get("constant", "")
    run_id = given.get("run_id") or job.name.rpartition("/")[2]
    return join_uri(str(root_uri), "runs", str(run_id)) if root_uri else ""


def _not_found(address: Address) -> UserError:
    place = address.place
    return UserError(
        f"no run {address.job_id} on Vertex AI in project {place.project}, {place.location}",
        expected="the name of a pipeline job there",
        fix=f"look for it at https://console.cloud.google.com/vertex-ai/pipelines/runs?project={place.project}\n"
        "and give its resource name, or --project and --location",
        code=ExitCode.NOT_FOUND,
    )
