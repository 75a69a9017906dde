"""Requests to Kubeflow Pipelines: none is waited for longer than its limit, and a run that may have started is not said
to have failed, because who submits it again pays twice."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import urllib3
import yaml
from urllib3.exceptions import HTTPError

from tests.fakes.kubeflow_pipelines import FakePipelines
from tests.support.vertex.submit_runs import APPROVED
from vlmpipe.platforms.kubeflow.runs.client import KubeflowRuns, _request_in_time, may_have_arrived
from vlmpipe.platforms.kubeflow.runs.names import KubeflowRun
from vlmpipe.trainer.errors import ExitCode, UserError

RUNS = "/apis/v2beta1/runs"
PIPELINE = {
    "pipelineInfo": {"name": "empty"},
    "root": {"inputDefinitions": {"parameters": {"run_id": {"parameterType": "STRING", "isOptional": True}}}},
    "schemaVersion": "2.1.0",
    "sdkVersion": "kfp-2.14.0",
}


def start(server: FakePipelines, folder: Path) -> UserError:
    package = folder / "empty.yaml"
    package.write_text(yaml.safe_dump(PIPELINE))
    runs = KubeflowRuns(server.endpoint)
    with pytest.raises(UserError) as caught:
        runs.start(package, APPROVED, name="digits-1", experiment="vlmpipe", parameters={"run_id": "digits-1"})
    return caught.value


@pytest.mark.parametrize("code", [0, 504])
def test_a_start_without_a_good_answer_may_have_started(tmp_path: Path, code: int) -> None:
    with FakePipelines() as server:
        server.late[RUNS] = code
        error = start(server, tmp_path)
        assert [run["display_name"] for run in server.runs.values()] == ["digits-1"]
        assert error.code == ExitCode.UNAVAILABLE and "whether the run was started is not known" in error.found
        assert "digits-1" in error.fix and f"{server.endpoint}/#/runs" in error.fix and "only if it is not" in error.fix


def test_a_start_that_is_refused_has_not_started(tmp_path: Path) -> None:
    with FakePipelines() as server:
        server.faults = [0, 0, 429]  # the experiment is looked for and made before
        error = start(server, tmp_path)
        assert not server.runs and error.found.startswith("could not start a run on")


def test_a_service_that_says_to_come_back_is_not_waited_for() -> None:
    with FakePipelines() as server:
        runs = KubeflowRuns(server.endpoint)
        server.faults, server.retry_after_s = [503, 503], 1
        began, before = time.monotonic(), len(server.requests)
        with pytest.raises(UserError, match="503"):
            runs.get(KubeflowRun(server.endpoint, "00000000-0000-0000-0000-000000000000"))
        assert len(server.requests) == before + 1 and time.monotonic() - began < 1


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:9", "https://127.0.0.1:9"])
def test_a_request_without_a_connection_has_not_arrived(endpoint: str) -> None:
    with pytest.raises(HTTPError) as caught, urllib3.PoolManager() as pool:
        _request_in_time(pool.request, "POST", endpoint)
    assert not may_have_arrived(caught.value)
