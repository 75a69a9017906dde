"""Deployment on a Vertex AI endpoint: Google's client against the strict local server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from google.api_core.retry import Retry
from google.cloud.aiplatform_v1 import types as api

from tests.fakes.vertex.server import FakeVertex
from tests.support.vertex.endpoints import asked_questions, right, wrong
from trainer.errors import ExitCode, UserError
from vlmpipe.backends.vertex import retries
from vlmpipe.backends.vertex.client import ENDPOINT_VARIABLE, Place
from vlmpipe.config.sections.deploy import DeployConfig
from vlmpipe.serving import vertex_endpoint
from vlmpipe.serving.agreement import measure_agreement, require_agreement
from vlmpipe.serving.vertex_endpoint import VertexEndpoint

PLACE = Place("test-project", "us-central1", "jobs@test-project.iam.gserviceaccount.com")
MODEL = f"{PLACE.parent}/models/digits"
IMAGE = "us-docker.pkg.dev/test-project/serving/vllm:1"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeVertex]:
    monkeypatch.setattr(retries, "RETRY", Retry(initial=0.01, maximum=0.05, timeout=5.0))
    monkeypatch.setattr(vertex_endpoint, "POLLING", vertex_endpoint.DEFAULT_POLLING.with_delay(initial=0.01))
    with FakeVertex() as running:
        monkeypatch.setenv(ENDPOINT_VARIABLE, running.endpoint)
        for _ in range(2):  # two versions of one model
            model = api.Model(
                display_name="digits", artifact_uri="gs://bucket/model", container_spec={"image_uri": IMAGE}
            )
            running.models._add("digits", model)
        running.endpoints.answers = {"1": right, "2": right}
        yield running


def deployed(server: FakeVertex, version: str, **changes: Any) -> dict[str, int]:
    deploy = DeployConfig(endpoint="digits", image_uri=IMAGE, **{"canary_percent": 20, **changes})
    endpoint = VertexEndpoint(PLACE, deploy, labels={"team": "vision"}, encryption_key="")
    with endpoint.canary(f"{MODEL}@{version}", f"run-{version}") as canary:
        require_agreement(measure_agreement(asked_questions(), endpoint.ask(canary, "digits")), deploy.min_agreement)
    return endpoint.promote(canary)


def state(server: FakeVertex) -> dict[str, int]:
    """Share of the traffic by version, of all deployed models."""
    if "digits" not in server.endpoints.endpoints:
        return {}
    found = server.endpoints.endpoints["digits"]
    return {one.model_version_id: found.traffic_split.get(one.id, 0) for one in found.deployed_models}


def test_the_first_model_makes_the_endpoint_and_takes_all_traffic(server: FakeVertex) -> None:
    deployed(server, "1")
    assert state(server) == {"1": 100}
    assert server.endpoints.predictions == ["1"] * 10


def test_the_next_model_is_tested_with_its_share_and_then_replaces_the_first(server: FakeVertex) -> None:
    deployed(server, "1")
    server.endpoints.predictions.clear()
    deployed(server, "2")
    assert state(server) == {"2": 100}
    share = server.endpoints.predictions.count("2") / len(server.endpoints.predictions)
    assert server.endpoints.predictions.count("2") == 10
    assert 0.1 < share < 0.35  # 20 % of the traffic: the rest went to the first model


def test_a_final_share_leaves_the_champion_the_rest(server: FakeVertex) -> None:
    deployed(server, "1")
    deployed(server, "2", traffic_percent=30)
    assert state(server) == {"1": 70, "2": 30}


def test_other_answers_than_the_evaluations_give_all_traffic_back_to_the_champion(server: FakeVertex) -> None:
    deployed(server, "1")
    server.endpoints.answers["2"] = wrong
    with pytest.raises(UserError, match="1 of 10 held-out questions answered as in evaluation") as caught:
        deployed(server, "2")
    assert caught.value.code == ExitCode.REJECTED
    assert state(server) == {"1": 100}


@pytest.mark.parametrize(("status", "code"), [(403, ExitCode.NO_PERMISSION), (429, ExitCode.UNAVAILABLE)])
def test_an_endpoint_that_refuses_traffic_leaves_nothing_deployed(
    server: FakeVertex, status: int, code: ExitCode
) -> None:
    server.endpoints.refuses = status
    with pytest.raises(UserError, match=f"refuses the request: {status}") as caught:
        deployed(server, "1")
    assert caught.value.code == code
    assert "digits" not in server.endpoints.endpoints


def test_a_deployment_that_the_service_gives_up_leaves_nothing(server: FakeVertex) -> None:
    deployed(server, "1")
    server.endpoints.fail_next = "The model server exited unexpectedly: CUDA out of memory"
    with pytest.raises(UserError, match="CUDA out of memory"):
        deployed(server, "2")
    assert state(server) == {"1": 100}


@pytest.mark.parametrize("ends", ["cancelled", "done"])
def test_a_deployment_that_takes_too_long_is_cancelled_and_leaves_nothing_however_that_ends(
    server: FakeVertex, ends: str
) -> None:
    deployed(server, "1")
    server.endpoints.slow_next = ends
    with pytest.raises(UserError, match="has not ended after 1 s"):
        deployed(server, "2", timeout_s=1)
    assert state(server) == {"1": 100} and not server.endpoints._running


def test_an_attempt_that_was_killed_is_continued_and_can_still_be_undone(
    server: FakeVertex, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployed(server, "1")
    deploy = DeployConfig(endpoint="digits", image_uri=IMAGE, canary_percent=20)
    endpoint = VertexEndpoint(PLACE, deploy, labels={}, encryption_key="")
    with monkeypatch.context() as killed:
        killed.setattr(VertexEndpoint, "_undo", lambda *_: None)
        with pytest.raises(KeyboardInterrupt), endpoint.canary(f"{MODEL}@2", "run-2"):
            raise KeyboardInterrupt
    assert state(server) == {"1": 80, "2": 20}
    server.endpoints.answers["2"] = wrong
    with pytest.raises(UserError):
        deployed(server, "2")
    assert state(server) == {"1": 100}
    assert sum(":deployModel" in request for request in server.requests) == 2


def test_the_canary_keeps_the_proportions_of_the_models_before_it(server: FakeVertex) -> None:
    assert vertex_endpoint._scaled({"a": 70, "b": 30}, 90) == {"a": 63, "b": 27}
    assert vertex_endpoint._scaled({"a": 1, "b": 1, "c": 1}, 100) == {"a": 34, "b": 33, "c": 33}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"deployedModel": {"model": f"{MODEL}@1"}}, "a machine type is required"),
        ({"deployedModel": {"model": MODEL}}, "is no version of a model"),
        ({"deployedModel": {"model": f"{MODEL}@9"}}, "does not exist"),
        ({"deployedModels": {}}, "deployedModels"),
        (
            {
                "deployedModel": {
                    "model": f"{MODEL}@1",
                    "dedicatedResources": {"machineSpec": {"machineType": "m"}, "minReplicaCount": 1,
                                           "maxReplicaCount": 1},
                },
                "trafficSplit": {"0": 50},
            },
            "does not add up to 100",
        ),
    ],
)  # fmt: skip
def test_the_fake_refuses_what_the_api_refuses(server: FakeVertex, body: dict[str, Any], said: str) -> None:
    import json

    from vlmpipe.rehearsal.http_server import ApiError

    server.endpoints.create({"endpointId": "digits"}, b'{"displayName": "d"}')
    with pytest.raises(ApiError, match=said):
        server.endpoints.deploy("digits", json.dumps(body).encode())
