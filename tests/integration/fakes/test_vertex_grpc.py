"""The door by gRPC to the strict Vertex AI: Google's clients as they are, with the same rules behind it as by REST."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest
from google.api_core import exceptions
from google.cloud.aiplatform_v1 import CancelPipelineJobRequest, JobServiceClient, PipelineServiceClient
from google.protobuf import json_format

from tests.fakes.vertex.grpc import grpc_front
from tests.fakes.vertex.server import FakeVertex
from tests.support.vertex.submit_runs import CONFIG, MINE
from vlmpipe.config.run_config import RunConfig, load_run_file
from vlmpipe.job_spec.build import job_spec
from vlmpipe.pipelines.compile import compile_pipeline
from vlmpipe.platforms.vertex.pipeline_job import Submission, prepare
from vlmpipe.rehearsal.vertex.server import BILLING_LABEL

RUN_URI = "gs://example-bucket/vlmpipe/runs/r"


@pytest.fixture
def vertex() -> Iterator[FakeVertex]:
    with FakeVertex() as server:
        yield server


@pytest.fixture
def channel(vertex: FakeVertex) -> Iterator[grpc.Channel]:
    with grpc_front(vertex) as (address, _), grpc.insecure_channel(address) as open_channel:
        yield open_channel


@pytest.fixture
def pipelines(channel: grpc.Channel) -> PipelineServiceClient:
    return PipelineServiceClient(transport=PipelineServiceClient.get_transport_class("grpc")(channel=channel))


@pytest.fixture
def jobs(channel: grpc.Channel) -> JobServiceClient:
    return JobServiceClient(transport=JobServiceClient.get_transport_class("grpc")(channel=channel))


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return load_run_file(CONFIG, [MINE])


@pytest.fixture(scope="module")
def submission(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Submission:
    path = compile_pipeline(config, "vertex", tmp_path_factory.mktemp("compiled") / "pipeline.yaml").path
    return prepare(config, path, job_id="by-grpc")


def test_a_pipeline_job_is_the_same_by_grpc_and_by_rest(
    vertex: FakeVertex, pipelines: PipelineServiceClient, submission: Submission
) -> None:
    made = pipelines.create_pipeline_job(
        parent=vertex.parent, pipeline_job=submission.job, pipeline_job_id=submission.job_id
    )
    kept = vertex.jobs[made.name]
    assert kept.pipeline_spec == submission.job.pipeline_spec
    assert kept.labels.pop(BILLING_LABEL), "the service's own"
    assert (kept.labels, kept.runtime_config) == (submission.job.labels, submission.job.runtime_config)
    assert pipelines.get_pipeline_job(name=made.name).name == made.name
    pipelines.cancel_pipeline_job(CancelPipelineJobRequest(name=made.name))
    assert vertex.jobs[made.name].state.name == "PIPELINE_STATE_CANCELLING"


def test_grpc_refuses_the_same_requests_as_rest(vertex: FakeVertex, jobs: JobServiceClient, config: RunConfig) -> None:
    spec = job_spec(config, "train", RUN_URI)
    wrong = {**spec, "worker_pool_specs": [{**spec["worker_pool_specs"][0], "replica_count": 2}]}
    with pytest.raises(exceptions.InvalidArgument, match="worker pool 0 has exactly one replica"):
        jobs.create_custom_job(parent=vertex.parent, custom_job={"display_name": "wrong", "job_spec": wrong})
    assert vertex.custom_jobs.jobs == {}
    with pytest.raises(exceptions.NotFound):
        jobs.get_custom_job(name=f"{vertex.parent}/customJobs/9001")
    with pytest.raises(exceptions.PermissionDenied):
        jobs.get_custom_job(name="projects/another/locations/us-central1/customJobs/9001")


def test_jobs_are_listed_by_label(vertex: FakeVertex, jobs: JobServiceClient, config: RunConfig) -> None:
    job = {"display_name": "train", "job_spec": job_spec(config, "train", RUN_URI), "labels": {"team": "vision"}}
    made = jobs.create_custom_job(parent=vertex.parent, custom_job=job)
    found = jobs.list_custom_jobs(request={"parent": vertex.parent, "filter": "labels.team=vision"})
    assert [json_format.MessageToDict(type(one).pb(one)) for one in found] == [
        json_format.MessageToDict(type(made).pb(made))
    ]


@pytest.mark.parametrize(
    "method",
    [
        "/google.cloud.aiplatform.v1.JobService/CreateEverything",
        "/google.cloud.aiplatform.v2.JobService/GetCustomJob",
    ],
)
def test_a_call_that_the_api_does_not_have_is_not_answered(channel: grpc.Channel, method: str) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(method)(b"")
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
