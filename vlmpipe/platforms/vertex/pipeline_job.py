"""Turns a compiled pipeline into a pipeline job request, and sends it exactly once.

The generated client is used rather than `aiplatform.PipelineJob.submit`, which first looks for the bucket, creates it
if it is missing, and takes one to two minutes where it may not look. A test compares the requests of both.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from google.api_core import exceptions
from google.auth.exceptions import GoogleAuthError
from google.cloud.aiplatform_v1.types import EncryptionSpec, PipelineFailurePolicy, PipelineJob, PscInterfaceConfig
from google.protobuf import json_format
from requests.exceptions import RequestException

from vlmpipe.google_cloud.client import Place, translate_errors
from vlmpipe.google_cloud.retries import may_have_arrived, send_request
from vlmpipe.platforms.pipeline_yaml import documents
from vlmpipe.platforms.vertex.requirements import require_reached_files, require_vertex
from vlmpipe.trainer.config.job import require_run_id, run_uri_of
from vlmpipe.trainer.errors import ExitCode, UserError

if TYPE_CHECKING:
    from google.cloud.aiplatform_v1.services.pipeline_service import PipelineServiceClient

    from vlmpipe.config.run_config import RunConfig
    from vlmpipe.planner.spending.approval import Approved

# Identifies our own job when its answer was lost, among others of the same name.
SUBMISSION_LABEL = "vlmpipe-submission"


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
        return self.place.console_url(self.job_id, in_pipelines=True)

    def as_dict(self) -> dict[str, object]:
        """The request in the REST API's spelling, without the pipeline itself, which is the compiled file."""
        job = json_format.MessageToDict(PipelineJob.pb(self.job))
        del job["pipelineSpec"]
        return {"parent": self.place.parent, "pipelineJobId": self.job_id, "pipelineJob": job}


def prepare(config: RunConfig, pipeline: Path, *, job_id: str, run_id: str = "", template_uri: str = "") -> Submission:
    """The request for the compiled pipeline of `config`; nothing is sent.

    Args:
        pipeline: the file that `compile_pipeline` wrote for the target vertex.
        job_id: see `job_id_at`.
        run_id: an earlier run to continue, as the pipeline's parameter; empty for a new one. The other parameters stay
            as compiled: the plan priced the run file.
        template_uri: where the pipeline was published, by its version; the console then links the run to it.

    Raises ConfigError for a run file that lacks what a run on Vertex AI needs, or a run id that is no folder's name.
    """
    require_vertex(config)
    require_reached_files(config)
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
        reserved_ip_ranges=gcp.reserved_ip_ranges,
        template_uri=template_uri,
    )
    (content,) = documents(pipeline.read_bytes())
    json_format.ParseDict(content, PipelineJob.pb(job).pipeline_spec)
    if gcp.psc_interface_config:
        job.psc_interface_config = PscInterfaceConfig(gcp.psc_interface_config.model_dump(mode="json"))
    if gcp.encryption_spec_key_name:
        job.encryption_spec = EncryptionSpec(kms_key_name=gcp.encryption_spec_key_name)
    if name := run_id or job_id:  # a schedule's runs are named when they start
        require_run_id(name)
    return Submission(Place.of(config), job_id, job, run_uri_of(config.bucket_root_uri, run_id, job_id))


def send(submission: Submission, client: PipelineServiceClient, approved: Approved) -> PipelineJob:
    """Create the job; returns the server's answer. Repeated after a passing fault, it is one job: its name is its key.

    Raises UserError for all errors of Google's client. Without any answer, it warns that the job may exist.
    """
    faults: list[Exception] = []
    with translate_errors(submission.place):
        try:
            try:
                return send_request(
                    client.create_pipeline_job,
                    parent=submission.place.parent,
                    pipeline_job=submission.job,
                    pipeline_job_id=submission.job_id,
                    faults=faults,
                )
            except exceptions.Conflict as conflict:
                result = send_request(client.get_pipeline_job, name=submission.resource_name, faults=faults)
                if result.labels.get(SUBMISSION_LABEL) == submission.job.labels[SUBMISSION_LABEL]:
                    return result  # our own, whose answer was lost
                taken = conflict
        except (exceptions.GoogleAPICallError, GoogleAuthError, RequestException) as error:
            if not may_have_arrived(faults):
                raise
            reason = " ".join(str(error).split())[:300]
            raise UserError(
                f"Vertex AI gave no good answer: {reason}; whether the run was started is not known",
                expected="an answer to the request that creates pipeline job " + submission.job_id,
                fix=f"look at {submission.console_url}\nand submit again only if it is not there",
                code=ExitCode.UNAVAILABLE,
            ) from error
        raise taken
