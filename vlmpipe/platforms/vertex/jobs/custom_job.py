"""Custom jobs on Vertex AI: the request of one without a pipeline, and creating a job exactly once."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from google.api_core import exceptions
from google.cloud.aiplatform_v1 import types as api
from google.protobuf import json_format

from vlmpipe.google_cloud.client import Place, translate_errors
from vlmpipe.google_cloud.retries import PASSING, list_all, send_once
from vlmpipe.platforms.vertex.pipeline_job import SUBMISSION_LABEL

if TYPE_CHECKING:
    from google.cloud.aiplatform_v1.services.job_service import JobServiceClient

    from vlmpipe.planner.spending.approval import Approved

WHAT = "custom job"  # in errors
POLL_S = 20.0
ATTEMPTS = 3  # to create a job whose answers get lost
REQUESTS = re.compile(r"per minute|per second", re.I)  # a quota of requests, not of machines


@dataclass(frozen=True)
class JobSubmission:
    """One request to create a custom job, whole, before it is sent."""

    place: Place
    job: api.CustomJob

    @classmethod
    def of(
        cls,
        place: Place,
        spec: api.CustomJobSpec,
        *,
        display_name: str,
        labels: Mapping[str, str],
        encryption_key: str = "",
    ) -> JobSubmission:
        """The request, with a label by which the job is found again."""
        job = api.CustomJob(
            display_name=display_name,
            labels={**labels, SUBMISSION_LABEL: secrets.token_hex(8)},
            job_spec=spec,
            encryption_spec=api.EncryptionSpec(kms_key_name=encryption_key) if encryption_key else None,
        )
        return cls(place, job)

    def as_dict(self) -> dict[str, object]:
        """The request in the REST API's spelling."""
        return {"parent": self.place.parent, "customJob": json_format.MessageToDict(api.CustomJob.pb(self.job))}

    def send(self, client: JobServiceClient, approved: Approved) -> api.CustomJob:
        """Create the job; the server's answer. Raises UserError for all errors of Google's client."""
        with translate_errors(self.place, what=WHAT):
            return create_job(client, self.place, self.job)


def create_job(
    client: JobServiceClient, place: Place, request: api.CustomJob, sleep: Callable[[float], None] = time.sleep
) -> api.CustomJob:
    """Create the job, or find it where an answer was lost, by the label of its submission: it is never created twice.

    Raises the client's errors. A quota of machines that is used up is not tried again.
    """
    token = request.labels[SUBMISSION_LABEL]
    fault: Exception | None = None
    for number in range(ATTEMPTS):
        if result := find_job(client, place, token):
            return result
        try:
            return send_once(client.create_custom_job, parent=place.parent, custom_job=request)
        except (*PASSING, exceptions.TooManyRequests) as error:
            if isinstance(error, exceptions.TooManyRequests) and not REQUESTS.search(error.message):
                raise
            fault = error
            sleep(POLL_S * (number + 1))
    if result := find_job(client, place, token):
        return result
    assert fault
    raise fault


def find_job(client: JobServiceClient, place: Place, token: str) -> api.CustomJob | None:
    """The job with this label of its submission; None where there is none."""
    request = api.ListCustomJobsRequest(parent=place.parent, filter=f"labels.{SUBMISSION_LABEL}={token}")
    return next(iter(list_all(client.list_custom_jobs, request)), None)
