"""Deployment on a Vertex AI endpoint: Google's client against the strict local server."""

from __future__ import annotations

import io
import json
import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
from google.api_core.retry import Retry
from google.cloud.aiplatform_v1 import types as api
from PIL import Image

from tests.fakes.vertex.server import FakeVertex
from tests.support.vertex.endpoints import asked_questions, right, wrong
from vlmpipe.config.sections.deploy import DeployConfig
from vlmpipe.google_cloud import retries
from vlmpipe.google_cloud.client import ENDPOINT_VARIABLE, Place
from vlmpipe.platforms.vertex import endpoint as vertex_endpoint
from vlmpipe.platforms.vertex.endpoint import VertexEndpoint
from vlmpipe.rehearsal.http_server import ApiError
from vlmpipe.serving import waking
from vlmpipe.serving.agreement import measure_agreement, require_agreement
from vlmpipe.serving.questions import ValidationQuestion, chat_messages
from vlmpipe.trainer.errors import ConfigError, ExitCode, UserError

PLACE = Place("test-project", "us-central1", "jobs@test-project.iam.gserviceaccount.com")
MODEL = f"{PLACE.parent}/models/digits"
IMAGE = f"us-docker.pkg.dev/test-project/serving/vllm@sha256:{'1' * 64}"


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


def endpoint_of(**changes: Any) -> VertexEndpoint:
    deploy = DeployConfig(endpoint="digits", image_uri=IMAGE, **{"canary_percent": 20, **changes})
    return VertexEndpoint(PLACE, deploy, labels={"team": "vision"}, encryption_key="")


def deployed(server: FakeVertex, version: str, **changes: Any) -> dict[str, int]:
    deploy = DeployConfig(endpoint="digits", image_uri=IMAGE, **{"canary_percent": 20, **changes})
    endpoint = endpoint_of(**changes)
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


def test_an_endpoint_that_is_made_is_dedicated_and_asked_at_its_own_address(server: FakeVertex) -> None:
    deployed(server, "1")
    assert server.endpoints.endpoints["digits"].dedicated_endpoint_enabled
    with pytest.raises(ApiError, match="it is dedicated"):
        server.endpoints.raw_predict("digits", b"{}", server.endpoint.removeprefix("http://"))


def test_an_endpoint_that_was_made_as_a_shared_one_is_asked_at_the_regions_address(server: FakeVertex) -> None:
    server.endpoints.create({"endpointId": "digits"}, b'{"displayName": "digits"}')
    deployed(server, "1")
    assert state(server) == {"1": 100}
    assert server.endpoints.predictions == ["1"] * 10


def test_a_dedicated_endpoint_without_an_address_is_an_error_that_leaves_nothing(server: FakeVertex) -> None:
    server.endpoints.create({"endpointId": "digits"}, b'{"displayName": "d", "dedicatedEndpointEnabled": true}')
    server.endpoints.endpoints["digits"].dedicated_endpoint_dns = ""
    with pytest.raises(UserError, match="a dedicated endpoint without an address") as caught:
        deployed(server, "1")
    assert caught.value.code == ExitCode.UNAVAILABLE
    assert state(server) == {}


@pytest.mark.parametrize(
    "address", ["7.us-central1-9.prediction.vertexai.goog", "https://7.us-central1-9.prediction.vertexai.goog/"]
)
def test_a_dedicated_address_is_asked_encrypted_in_both_forms_that_are_documented(address: str) -> None:
    assert vertex_endpoint._with_scheme(address) == "https://7.us-central1-9.prediction.vertexai.goog"


def large_question(num_bytes: int) -> ValidationQuestion:
    """A question whose request is larger than this."""
    side = 1 + math.isqrt(num_bytes // 4)  # 3 bytes a pixel, and base64 writes 4 for 3
    picture = io.BytesIO()
    Image.frombytes("RGB", (side, side), random.Random(0).randbytes(3 * side**2)).save(picture, "PNG", compress_level=0)
    return ValidationQuestion(
        "large", 0, chat_messages("<image>\nwhat?", "", [picture.getvalue()], as_text=True), 4, "1"
    )


@pytest.mark.parametrize(
    ("is_shared", "num_bytes", "limit"), [(True, 1_500_000, "1.5 MB"), (False, 10_000_000, "10 MB")]
)
def test_questions_above_the_limit_are_refused_before_anything_is_sent(
    server: FakeVertex, is_shared: bool, num_bytes: int, limit: str
) -> None:
    if is_shared:
        server.endpoints.create({"endpointId": "digits"}, b'{"displayName": "digits"}')
    with pytest.raises(UserError, match="1 of 11 validation questions are too large") as caught:
        endpoint_of().require_public([*asked_questions(), large_question(num_bytes)], "digits")
    assert caught.value.code == ExitCode.DATA
    assert f"at most {limit}" in caught.value.expected
    assert ("a new one is dedicated" in caught.value.fix) is is_shared
    assert not any(request.startswith("POST") for request in server.requests)


def test_a_question_too_large_for_a_shared_endpoint_is_answered_by_a_dedicated_one(server: FakeVertex) -> None:
    server.endpoints.answers["1"] = lambda question: "1"
    question, endpoint = large_question(2_000_000), endpoint_of()
    endpoint.require_public([question], "digits")
    with endpoint.canary(f"{MODEL}@1", "run-1") as canary:
        assert endpoint.ask(canary, "digits")(question.messages, 4).text == "1"


def test_a_private_endpoint_is_refused_before_anything_is_deployed(server: FakeVertex) -> None:
    server.endpoints.create(
        {"endpointId": "digits"}, b'{"displayName": "d", "network": "projects/1/global/networks/n"}'
    )
    with pytest.raises(ConfigError, match="is a private endpoint"):
        endpoint_of().require_public(asked_questions(), "digits")


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
    with pytest.raises(UserError, match="1 of 10 validation questions answered as in evaluation") as caught:
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
    server: FakeVertex, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    deployed(server, "1")
    server.endpoints.slow_next = ends
    monkeypatch.setattr(vertex_endpoint, "GRACE_S", 0.0)
    with pytest.raises(UserError, match="has not ended after 1 s"):
        deployed(server, "2", deployment_timeout_s=1)
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
    assert vertex_endpoint.scaled({"a": 70, "b": 30}, 90) == {"a": 63, "b": 27}
    assert vertex_endpoint.scaled({"a": 1, "b": 1, "c": 1}, 100) == {"a": 34, "b": 33, "c": 33}


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
def test_the_fake_refuses_deployments_that_the_api_refuses(server: FakeVertex, body: dict[str, Any], said: str) -> None:
    server.endpoints.create({"endpointId": "digits"}, b'{"displayName": "d"}')
    with pytest.raises(ApiError, match=said):
        server.endpoints.deploy("digits", json.dumps(body).encode())


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "display_name"),
        ({"displayName": "d" * 129}, "at most 128"),
        ({"displayName": "d", "dedicatedEndpointDns": "https://d"}, "output-only"),
        ({"displayName": "d", "deployedModels": [{"id": "1"}]}, "output-only"),
        ({"displayName": "d", "labels": {"Team": "v"}}, "labels"),
        ({"displayName": "d", "network": "n", "enablePrivateServiceConnect": True}, "only one of network"),
        ({"displayName": "d", "clientConnectionConfig": {"inferenceTimeout": "3601s"}}, "at most an hour"),
        ({"displayName": "d", "dedicatedEndpoint": True}, "dedicatedEndpoint"),
    ],
)
def test_the_fake_refuses_endpoints_that_the_api_refuses(server: FakeVertex, body: dict[str, Any], said: str) -> None:
    with pytest.raises(ApiError, match=said):
        server.endpoints.create({"endpointId": "digits"}, json.dumps(body).encode())


@pytest.mark.parametrize(
    ("container", "said"),
    [
        ({"deploymentTimeout": "7201s"}, "limit is 2 hours"),
        ({"sharedMemorySizeMb": "-1"}, "shared_memory_size_mb"),
        ({"predictRoute": "/a", "invokeRoutePrefix": "/*"}, "only one of predict_route"),
        ({"invokeRoutePrefix": "/a"}, "only supported value"),
        ({"env": [{"name": "A"}]}, "has no value"),
        ({"startupProbe": {"periodSeconds": 10, "timeoutSeconds": 5}}, "at least its period_seconds"),
    ],
)
def test_the_fake_refuses_containers_that_the_api_refuses(
    server: FakeVertex, container: dict[str, Any], said: str
) -> None:
    model = {"displayName": "d", "artifactUri": "gs://bucket/model", "containerSpec": {"imageUri": IMAGE, **container}}
    with pytest.raises(ApiError, match=said.replace("*", r"\*")):
        server.models.upload(json.dumps({"modelId": "m", "model": model}).encode())


def test_the_fake_answers_requests_up_to_the_limit_only(server: FakeVertex) -> None:
    server.endpoints.create({"endpointId": "digits"}, b'{"displayName": "digits"}')
    with pytest.raises(ApiError, match=r"exceeds 1\.500MB limit"):
        server.endpoints.raw_predict("digits", b"x" * 1_500_001, server.endpoint.removeprefix("http://"))


def test_an_endpoint_without_a_minimum_sleeps_by_v1beta1_and_is_waited_for(
    server: FakeVertex, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waking, "WAKING_POLL_S", 0.01)
    server.endpoints.waking = 3
    deployed(server, "1", min_replicas=0, max_replicas=2, idle_minutes=45)
    assert state(server) == {"1": 100}
    assert (server.endpoints.sleeping, server.endpoints.idle_s) == (True, 45 * 60)
    assert server.endpoints.waking == 0 and server.endpoints.predictions == ["1"] * 10
    (sent,) = (request for request in server.requests if "deployModel" in request)
    assert "/v1beta1/" in sent


def test_an_endpoint_with_a_minimum_is_not_waited_for(server: FakeVertex) -> None:
    server.endpoints.waking = 1
    with pytest.raises(UserError) as caught:
        deployed(server, "1")
    assert caught.value.code == ExitCode.UNAVAILABLE
    assert state(server) == {}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"initial_replica_count": 0}, "initial_replica_count must be from 1"),
        ({"initial_replica_count": 3}, "initial_replica_count must be from 1"),
        ({"min_replica_count": 1}, "are for min_replica_count 0"),
        ({"scale_to_zero_spec": {"idle_scaledown_period": "299s"}}, "idle_scaledown_period: not from 300"),
        ({"scale_to_zero_spec": {"min_scaleup_period": "28801s"}}, "min_scaleup_period: not from 300"),
        ({"scale_to_zero_spec": {"idle_s": 300}}, "idle_s"),
    ],
)
def test_the_server_refuses_what_the_comments_of_v1beta1_refuse(
    server: FakeVertex, changes: dict[str, Any], said: str
) -> None:
    server.endpoints.create({"endpointId": "digits"}, b'{"displayName": "digits", "dedicatedEndpointEnabled": true}')
    resources = {
        "machine_spec": {"machine_type": "g2-standard-12"}, "min_replica_count": 0, "max_replica_count": 2,
        "initial_replica_count": 1, "scale_to_zero_spec": {"idle_scaledown_period": "300s"}, **changes,
    }  # fmt: skip
    body = json.dumps({"deployed_model": {"model": f"{MODEL}@1", "dedicated_resources": resources}}).encode()
    with pytest.raises(ApiError, match=said):
        server.endpoints.deploy("digits", body, is_beta=True)


def test_v1_refuses_an_endpoint_that_sleeps(server: FakeVertex) -> None:
    server.endpoints.create({"endpointId": "digits"}, b'{"displayName": "digits", "dedicatedEndpointEnabled": true}')
    resources = {"machine_spec": {"machine_type": "g2-standard-12"}, "max_replica_count": 2}
    body = json.dumps({"deployed_model": {"model": f"{MODEL}@1", "dedicated_resources": resources}}).encode()
    with pytest.raises(ApiError, match="replica counts"):
        server.endpoints.deploy("digits", body)
