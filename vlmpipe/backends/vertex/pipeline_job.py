"""Turns a compiled pipeline into a pipeline job request, and sends it exactly once.

The generated client is used rather than `aiplatform.PipelineJob.submit`: that one first looks for the bucket, creates
it if it is not found, and spends one to two minutes where it cannot look. A test compares what the two send.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from google.api_core import exceptions
from google.api_core.retry import Retry
from google.auth.exceptions import GoogleAuthError
from google.cloud.aiplatform_v1.types import EncryptionSpec, PipelineFailurePolicy, PipelineJob, PscInterfaceConfig
from google.protobuf import json_format
from requests.exceptions import ConnectionError as NoConnection
from requests.exceptions import ConnectTimeout, ProxyError, RequestException, SSLError, Timeout
from urllib3.exceptions import NewConnectionError

from trainer.errors import ExitCode, UserError
from vlmpipe.backends.vertex.client import Place, translate_errors
from vlmpipe.backends.vertex.pipeline_yaml import documents
from vlmpipe.config.run_config import run_uri
from vlmpipe.config.target_requirements import require_data_in_cloud, require_vertex

if TYPE_CHECKING:
    from google.cloud.aiplatform_v1.services.pipeline_service import PipelineServiceClient

    from vlmpipe.config.run_config import RunConfig

Answer = TypeVar("Answer")
SUBMISSION_LABEL = (
    "vlmpipe-submission"  # tells our own job, whose answer was lost, from somebody else's of the same name
)
REQUEST_TIMEOUT_S = 30.0
PASSING = (
    exceptions.BadGateway,
    exceptions.GatewayTimeout,
    exceptions.InternalServerError,
    exceptions.ServiceUnavailable,
    NoConnection,
    Timeout,
)
RETRY = Retry(initial=0.5, maximum=8.0, timeout=45.0)


@dataclass(frozen=True)
class Submission:
    """One request to create a pipeline job, whole, before it is sent."""

    place: Place
    job_id: str
    job: PipelineJob
    run_uri: str

    @property
    def resource_name(self) -> str:
        return f"{self.place.parent}/pipelineJobs/{self.job_id}"

    @property
    def console_url(self) -> str:
        return self.place.console_url(self.job_id)

    def as_dict(self) -> dict[str, Any]:
        """The request in the REST API's spelling, without the pipeline itself, which is the compiled file."""
        job = json_format.MessageToDict(PipelineJob.pb(self.job))
        del job["pipelineSpec"]
        return {"parent": self.place.parent, "pipelineJobId": self.job_id, "pipelineJob": job}


def job_id_at(config: RunConfig, moment: datetime) -> str:
    """Name of the pipeline job and, unless --run-id says otherwise, of the run: <name>-<date>-<time>.

    At most 63 + 16 of the 128 characters that Vertex AI takes; a run file's name holds no others than it does.
    """
    return f"{config.name}-{moment:%Y%m%d-%H%M%S}"


def prepare(config: RunConfig, pipeline: Path, *, job_id: str, run_id: str = "", template_uri: str = "") -> Submission:
    """The request for the compiled pipeline of `config`; nothing is sent.

    Args:
        pipeline: the file that `compile_pipeline` wrote for the target vertex.
        job_id: see `job_id_at`.
        run_id: an earlier run to continue, as the pipeline's parameter; empty for a new one. The other parameters are
            not used here: what the plan priced is what is in the run file.
        template_uri: where the pipeline was published, by its version; the console then links the run to it.

    Raises ConfigError for a run file that lacks what a run on Vertex AI needs, or a run id that is no folder's name.
    """
    require_vertex(config)
    require_data_in_cloud(config)
    gcp = config.gcp
    job = PipelineJob(
        display_name=config.name,
        labels={**gcp.labels, SUBMISSION_LABEL: secrets.token_hex(8)},
        runtime_config=PipelineJob.RuntimeConfig(
            gcs_output_directory=gcp.pipeline_root,
            parameter_values={"run_id": run_id} if run_id else {},
            failure_policy=PipelineFailurePolicy.PIPELINE_FAILURE_POLICY_FAIL_FAST,
        ),
        service_account=gcp.service_account,
        network=gcp.network,
        template_uri=template_uri,
    )
    (content,) = documents(pipeline.read_bytes())
    json_format.ParseDict(content, PipelineJob.pb(job).pipeline_spec)
    if gcp.psc_interface_config:
        job.psc_interface_config = PscInterfaceConfig(gcp.psc_interface_config.model_dump())
    if gcp.encryption_spec_key_name:
        job.encryption_spec = EncryptionSpec(kms_key_name=gcp.encryption_spec_key_name)
    root = json.dumps({"root_uri": config.root_uri("vertex")})
    return Submission(Place.of(config), job_id, job, run_uri(root, run_id, job_id))


def send(submission: Submission, client: PipelineServiceClient) -> PipelineJob:
    """Create the job; the server's answer. Sent again after a passing fault, it is still one job: its name is its key.

    Raises UserError in words for everything that Google's client raises. Where an answer never came, it says that the
    job may be there.
    """
    faults: list[Exception] = []
    with translate_errors(submission.place):
        try:
            try:
                return retrying(faults, lambda: _create(client, submission))
            except exceptions.Conflict as conflict:
                found = retrying(faults, lambda: _get(client, submission))
                if found.labels.get(SUBMISSION_LABEL) == submission.job.labels[SUBMISSION_LABEL]:
                    return found  # our own, whose answer was lost
                taken = conflict
        except (exceptions.GoogleAPICallError, GoogleAuthError, RequestException) as error:
            if not may_have_arrived(faults):
                raise
            raise UserError(
                f"Vertex AI gave no good answer: {_short(error)}; whether the run was started is not known",
                expected="an answer to the request that creates pipeline job " + submission.job_id,
                fix=f"look at {submission.console_url}\nand submit again only if it is not there",
                code=ExitCode.UNAVAILABLE,
            ) from error
        raise taken


def retrying(faults: list[Exception], call: Callable[[], Answer]) -> Answer:
    """Call until it works, fails for good, or time is up; then raise the last fault. `faults` gets them all.

    A first request that finds nobody to talk to is not repeated: a person who is offline wants to know at once.
    """

    def passing(error: Exception) -> bool:
        faults.append(error)
        return isinstance(error, PASSING) and not all(_never_arrived(fault) for fault in faults)

    try:
        return RETRY.with_predicate(passing)(call)()
    except exceptions.RetryError as error:
        raise error.cause or error from error


def _create(client: PipelineServiceClient, submission: Submission) -> PipelineJob:
    return client.create_pipeline_job(
        parent=submission.place.parent,
        pipeline_job=submission.job,
        pipeline_job_id=submission.job_id,
        retry=None,
        timeout=REQUEST_TIMEOUT_S,
    )


def _get(client: PipelineServiceClient, submission: Submission) -> PipelineJob:
    return client.get_pipeline_job(name=submission.resource_name, retry=None, timeout=REQUEST_TIMEOUT_S)


def may_have_arrived(faults: list[Exception]) -> bool:
    """Whether a request may have been carried out although its answer never came."""
    return any(isinstance(fault, PASSING) and not _never_arrived(fault) for fault in faults)


def _never_arrived(fault: Exception) -> bool:
    """Whether the request certainly did not reach the service."""
    if isinstance(fault, ConnectTimeout | ProxyError | SSLError):
        return True
    wrapped = fault.args[0] if fault.args else None
    return isinstance(getattr(wrapped, "reason", None), NewConnectionError)


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
