"""Reads and cancels runs on Vertex AI."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from google.api_core import exceptions

from vlmpipe.google_cloud.client import Place, pipeline_client, translate_errors
from vlmpipe.google_cloud.retries import send_request
from vlmpipe.platforms.compiled_spec import compiled_root_uri, compiled_run_file, names_of_stages
from vlmpipe.platforms.vertex.runs.names import Address
from vlmpipe.trainer.errors import ConfigError, ExitCode, UserError
from vlmpipe.trainer.storage.base import join_uri

if TYPE_CHECKING:
    from google.cloud.aiplatform_v1.services.pipeline_service import PipelineServiceClient
    from google.cloud.aiplatform_v1.types import PipelineJob

ENDED = ("SUCCEEDED", "PARTIALLY_SUCCEEDED", "FAILED", "EXPIRED")
OVER = (*ENDED, "CANCELLED")
VIEWER, USER = "roles/aiplatform.viewer", "roles/aiplatform.user"


class Runs:
    """The pipeline jobs of one place. Errors of Google's client become UserErrors."""

    def __init__(self, place: Place, client: PipelineServiceClient | None = None) -> None:
        self._place = place
        self._client = client or pipeline_client(place.location)

    def get(self, address: Address) -> PipelineJob:
        """Raises UserError (exit 66) where there is no run of that name."""
        try:
            with translate_errors(self._place, role=VIEWER):
                return send_request(self._client.get_pipeline_job, name=address.resource_name)
        except UserError as error:
            cause = error.__cause__
            if isinstance(cause, exceptions.NotFound) and "location" not in cause.message.replace("/locations/", ""):
                raise _not_found(address) from cause
            raise

    def cancel(self, address: Address) -> bool:
        """Ask the service to stop the run; see `cancel_job`."""

        def send() -> None:
            with translate_errors(self._place, role=USER):
                send_request(self._client.cancel_pipeline_job, name=address.resource_name)

        return cancel_job(f"run {address.job_id}", address.argument, lambda: state_of(self.get(address)), send)


def cancel_job(what: str, argument: str, state: Callable[[], str], send: Callable[[], None]) -> bool:
    """Ask the service to cancel a job. False where it is being cancelled, or was cancelled, already.

    Args:
        what: the job for people.
        argument: names it on the command line.
        state: asks for its state, such as RUNNING.
        send: sends the request.

    Raises ConfigError for a job that ended in another way.
    """

    def is_cancelled() -> bool:
        result = state()
        if result in ENDED:
            raise ConfigError(
                f"{what} is over ({result.lower()}), so there is nothing to cancel",
                expected="one that is running",
                fix=f"vlmpipe status {argument}",
            )
        return result in ("CANCELLING", "CANCELLED")

    if is_cancelled():
        return False
    try:
        send()
    except UserError as error:  # it may have ended, or been cancelled by our own first request, meanwhile
        if not isinstance(error.__cause__, exceptions.BadRequest) or not is_cancelled():
            raise
    return True


def state_of(job: PipelineJob) -> str:
    """QUEUED, PENDING, RUNNING, SUCCEEDED, FAILED, CANCELLING, CANCELLED or PAUSED."""
    return str(job.state.name).removeprefix("PIPELINE_STATE_")


def stages_of_job(job: PipelineJob) -> list[str]:
    """The names of the run's stages, which are fixed when the pipeline is compiled; one empty name without stages."""
    return names_of_stages(compiled_run_file(job.pipeline_spec))


def run_uri_of_job(job: PipelineJob) -> str:
    """The run's folder, from the job's own parameters; empty for a job that is not vlmpipe's."""
    parameters = job.runtime_config.parameter_values or {}
    root_uri = compiled_root_uri(job.pipeline_spec)
    run_id = parameters.get("run_id") or job.name.rpartition("/")[2]
    return join_uri(root_uri, "runs", str(run_id)) if root_uri else ""


def _not_found(address: Address) -> UserError:
    place = address.place
    return UserError(
        f"no run {address.job_id} on Vertex AI in project {place.project}, {place.location}",
        expected="the name of a pipeline job there",
        fix=f"look for it at https://console.cloud.google.com/vertex-ai/pipelines/runs?project={place.project}\n"
        "and give its resource name, or --project and --location",
        code=ExitCode.NOT_FOUND,
    )
