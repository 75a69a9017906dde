"""Custom jobs without a pipeline on Vertex AI, as the rest of the program asks a platform for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vlmpipe.google_cloud.client import Place, endpoint, job_client
from vlmpipe.platforms.base import SentJob
from vlmpipe.platforms.vertex.jobs.custom_job import JobSubmission
from vlmpipe.platforms.vertex.requirements import require_own_project
from vlmpipe.platforms.vertex.run import RunOnVertex
from vlmpipe.platforms.vertex.runs.names import Address

if TYPE_CHECKING:
    from google.cloud.aiplatform_v1.types import CustomJobSpec

    from vlmpipe.planner.spending.approval import Approved


@dataclass(frozen=True)
class VertexJobs:
    """Custom jobs in one place."""

    place: Place

    @property
    def endpoint(self) -> str:
        return endpoint(self.place.location)

    def connect(self) -> None:
        require_own_project(self.place.project)
        job_client(self.place.location)

    def request(
        self, spec: CustomJobSpec, *, display_name: str, labels: Mapping[str, str], encryption_key: str = ""
    ) -> VertexJobRequest:
        names = {"display_name": display_name, "encryption_key": encryption_key}
        return VertexJobRequest(JobSubmission.of(self.place, spec, labels=labels, **names))


@dataclass(frozen=True)
class VertexJobRequest:
    """One request to create a custom job."""

    submission: JobSubmission

    def as_dict(self) -> dict[str, object]:
        return self.submission.as_dict()

    def send(self, approved: Approved) -> SentJob:
        place = self.submission.place
        name = self.submission.send(job_client(place.location), approved).name
        address = Address(place, name.rpartition("/")[2], is_custom_job=True)
        return SentJob(name, address.job_id, address.console_url, RunOnVertex(address))
