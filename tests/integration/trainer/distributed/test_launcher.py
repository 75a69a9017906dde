"""The compiled job steps under Google's own launcher of custom jobs, which sends them to the strict fake."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from google.cloud import aiplatform
from google.cloud.aiplatform_v1 import types as api
from google.cloud.aiplatform_v1.services.job_service import JobServiceClient
from google.protobuf import json_format
from google_cloud_pipeline_components.container.v1.custom_job import launcher
from google_cloud_pipeline_components.container.v1.gcp_launcher import job_remote_runner

from tests.fakes.vertex.grpc import grpc_front
from tests.fakes.vertex.server import FakeVertex
from tests.support.vertex.submit_runs import CONFIG, MINE
from vlmpipe.config.run_config import RunConfig, load_run_file
from vlmpipe.job_spec.build import Job, job_spec, step_of, worker_pools
from vlmpipe.pipelines.compile import compile_pipeline
from vlmpipe.rehearsal.vertex.custom_jobs import Step

RUN_URI = "gs://example-bucket/vlmpipe/runs/r"
INPUT = re.compile(r"\{\{\$\.inputs\.parameters\['(\w+)'\]\}\}")
OF_THE_SERVICE = re.compile(r"\{\{\$\.pipeline_(google_cloud|persistent)\w+\}\}")  # defaults of Google's component


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return load_run_file(CONFIG, [MINE, "cluster.replica_count=2"])


@pytest.fixture(scope="module")
def spec(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = compile_pipeline(config, "vertex", tmp_path_factory.mktemp("compiled") / "pipeline.yaml").path
    return dict(yaml.safe_load(path.read_text()))


@pytest.fixture
def vertex(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeVertex]:
    with FakeVertex() as server, grpc_front(server) as (address, calls), grpc.insecure_channel(address) as channel:

        def client(client_options: Any, client_info: Any) -> JobServiceClient:
            """The launcher's, with its own transport, but for its address, which it makes from the region."""
            assert client_options.api_endpoint == "us-central1-aiplatform.googleapis.com"
            transport = JobServiceClient.get_transport_class()(channel=channel, client_info=client_info)
            assert transport.kind == "grpc"
            return JobServiceClient(transport=transport)

        monkeypatch.setattr(aiplatform.gapic, "JobServiceClient", client)
        monkeypatch.setattr(job_remote_runner, "_POLLING_INTERVAL_IN_SECONDS", 0)
        yield server
        assert "JobService/CreateCustomJob" in calls


def arguments(spec: dict[str, Any], config: RunConfig, job: Job, resources: Path) -> list[str]:
    """What the service calls the launcher with: the step's inputs put into its arguments, lists and numbers as JSON."""
    step = step_of(job)
    dags = [spec["root"]["dag"], *(one["dag"] for one in spec["components"].values() if "dag" in one)]
    (task,) = (dag["tasks"][step] for dag in dags if step in dag["tasks"])
    component = spec["components"][task["componentRef"]["name"]]
    values = {name: one.get("defaultValue") for name, one in component["inputDefinitions"]["parameters"].items()}
    from_steps = {"worker_pool_specs": worker_pools(config, job, RUN_URI), "base_output_directory": RUN_URI}
    for name, source in task["inputs"]["parameters"].items():
        values[name] = source["runtimeValue"]["constant"] if "runtimeValue" in source else from_steps[name]

    def put_in(match: re.Match[str]) -> str:
        value = values[match[1]]
        return OF_THE_SERVICE.sub("", value) if isinstance(value, str) else json.dumps(value)

    told = spec["deploymentSpec"]["executors"][component["executorLabel"]]["container"]["args"]
    output = "{{$.outputs.parameters['gcp_resources'].output_file}}"
    return [INPUT.sub(put_in, text).replace(output, str(resources)) for text in told]


@pytest.mark.parametrize("job", ["cache_features", "train", "evaluate"])
def test_a_job_step_becomes_the_job_that_was_checked_and_is_taken_up_again(
    vertex: FakeVertex, spec: dict[str, Any], config: RunConfig, job: Job, tmp_path: Path
) -> None:
    vertex.custom_jobs.scripts.append([Step("QUEUED"), Step("RUNNING"), Step("SUCCEEDED")])
    told = arguments(spec, config, job, tmp_path / "gcp_resources")
    launcher.main(told)
    (created,) = vertex.custom_jobs.jobs.values()
    checked = json_format.ParseDict(job_spec(config, job, RUN_URI), api.CustomJobSpec.pb(api.CustomJobSpec()))
    assert json_format.MessageToDict(api.CustomJobSpec.pb(created.job_spec)) == json_format.MessageToDict(checked)
    assert created.labels["vlmpipe-step"] == step_of(job)
    resources = json.loads((tmp_path / "gcp_resources").read_text())["resources"]
    assert [one["resourceUri"].partition("/v1/")[2] for one in resources] == [created.name]

    launcher.main(told)  # the launcher's machine was lost, and the step begins again
    assert len(vertex.custom_jobs.jobs) == 1


@pytest.mark.parametrize(("code", "error"), [(9, ValueError), (8, SystemExit)], ids=["ours", "theirs"])
def test_a_job_that_fails_fails_its_step(
    vertex: FakeVertex, spec: dict[str, Any], config: RunConfig, code: int, error: type[BaseException], tmp_path: Path
) -> None:
    vertex.custom_jobs.scripts.append(
        [Step("RUNNING"), Step("FAILED", code, "The replica exited with a status of 65.")]
    )
    with pytest.raises(error):
        launcher.main(arguments(spec, config, "train", tmp_path / "gcp_resources"))
