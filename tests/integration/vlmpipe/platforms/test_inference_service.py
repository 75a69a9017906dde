"""Deployment as an InferenceService of KServe: the Kubernetes client against the strict local API."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.chat_model import ChatModelServer
from tests.fakes.kubernetes.api import FakeKubernetes
from tests.support.vertex.endpoints import asked_questions, right, wrong
from vlmpipe.config.sections.deploy import DeployConfig
from vlmpipe.config.sections.kubeflow import KubeflowConfig
from vlmpipe.platforms.kubeflow import inference_service
from vlmpipe.platforms.kubeflow.inference_service import InferenceService
from vlmpipe.serving.agreement import measure_agreement, require_agreement
from vlmpipe.trainer.errors import ConfigError, ExitCode, UserError

OLD, NEW = "gs://bucket/registry/1/model", "gs://bucket/registry/2/model"


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeKubernetes]:
    monkeypatch.setattr(inference_service, "POLL_S", 0.0)
    with FakeKubernetes() as running:
        monkeypatch.setenv("KUBECONFIG", str(running.kubeconfig(tmp_path)))
        yield running


def service(**changes: Any) -> InferenceService:
    deploy = DeployConfig(endpoint="digits", image_uri=f"vllm/vllm-openai@sha256:{'1' * 64}", **changes)
    return InferenceService(deploy, KubeflowConfig(service_account="server"), ["/mnt/models"])


def deployed(cluster: FakeKubernetes, uri: str, answer: Any = right, **changes: Any) -> int:
    with ChatModelServer("digits", answer) as server:
        cluster.inference_services.urls[uri] = server.url.removesuffix("/v1/chat/completions")
        one = service(**changes)
        with one.canary(uri, "run") as url:
            require_agreement(measure_agreement(asked_questions(), one.ask(url, "digits")), 0.95)
        return one.promote()


def state(cluster: FakeKubernetes) -> tuple[str, int] | None:
    """Files of the newest revision, and its share of the traffic."""
    found = cluster.inference_services.services.get("digits")
    if found is None:
        return None
    predictor = found["spec"]["predictor"]
    return predictor["containers"][0]["env"][0]["value"], predictor.get("canaryTrafficPercent", 100)


def test_the_first_model_makes_the_service(cluster: FakeKubernetes) -> None:
    assert deployed(cluster, OLD) == 100
    assert state(cluster) == (OLD, 100)
    predictor = cluster.inference_services.services["digits"]["spec"]["predictor"]
    assert predictor["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "1"}
    assert predictor["serviceAccountName"] == "server"
    (container,) = predictor["containers"]
    assert {one["name"]: one["value"] for one in container["env"]} == {
        "STORAGE_URI": OLD,
        "LD_LIBRARY_PATH": "/usr/local/nvidia/lib64:/usr/local/nvidia/lib",
    }
    assert predictor["volumes"][0]["emptyDir"] == {"medium": "Memory", "sizeLimit": "16384M"}
    assert container["volumeMounts"] == [{"name": "shared-memory", "mountPath": "/dev/shm"}]


def test_a_service_without_a_minimum_may_sleep(cluster: FakeKubernetes) -> None:
    assert deployed(cluster, OLD, min_replicas=0, max_replicas=2) == 100
    predictor = cluster.inference_services.services["digits"]["spec"]["predictor"]
    assert (predictor["minReplicas"], predictor["maxReplicas"]) == (0, 2)


def test_the_next_model_is_tested_at_its_own_address_and_takes_over(cluster: FakeKubernetes) -> None:
    deployed(cluster, OLD)
    with ChatModelServer("digits", right) as server:
        cluster.inference_services.urls[NEW] = server.url.removesuffix("/v1/chat/completions")
        one = service(canary_percent=10, traffic_percent=50)
        with one.canary(NEW, "run"):
            assert state(cluster) == (NEW, 10)
        assert one.promote() == 50
    assert state(cluster) == (NEW, 50)
    assert deployed(cluster, NEW) == 100
    assert state(cluster) == (NEW, 100)


def test_other_answers_give_the_service_its_former_spec(cluster: FakeKubernetes) -> None:
    deployed(cluster, OLD)
    former = cluster.inference_services.services["digits"]["spec"]
    with pytest.raises(UserError, match="1 of 10") as caught:
        deployed(cluster, NEW, wrong)
    assert caught.value.code == ExitCode.REJECTED
    assert cluster.inference_services.services["digits"]["spec"] == former


@pytest.mark.parametrize("answer", [right, wrong], ids=["promoted", "undone"])
def test_what_others_wrote_beside_the_spec_stays(cluster: FakeKubernetes, answer: Any) -> None:
    deployed(cluster, OLD)
    metadata = cluster.inference_services.services["digits"]["metadata"]
    theirs = {"serving.kserve.io/deploymentMode": "Knative", "team/owner": "vision"}
    metadata["annotations"] |= theirs
    metadata["labels"] = {"team": "vision"}
    with contextlib.suppress(UserError):
        deployed(cluster, NEW, answer)
    after = cluster.inference_services.services["digits"]["metadata"]
    assert theirs.items() <= after["annotations"].items()
    assert after["labels"] == {"team": "vision"}


def test_a_first_model_with_other_answers_leaves_no_service(cluster: FakeKubernetes) -> None:
    with pytest.raises(UserError, match="1 of 10"):
        deployed(cluster, OLD, wrong)
    assert state(cluster) is None


def test_a_model_that_never_gets_ready_is_taken_back(cluster: FakeKubernetes) -> None:
    with (
        pytest.raises(UserError, match="does not serve after 1 s: RevisionMissing") as caught,
        service(deployment_timeout_s=1).canary(NEW, "run"),
    ):
        pass
    assert caught.value.code == ExitCode.UNAVAILABLE
    assert state(cluster) is None


def test_a_killed_attempt_can_still_be_undone(cluster: FakeKubernetes, monkeypatch: pytest.MonkeyPatch) -> None:
    deployed(cluster, OLD)
    cluster.inference_services.urls[NEW] = "http://127.0.0.1:9"
    with monkeypatch.context() as killed:
        killed.setattr(InferenceService, "_undo", lambda *_: None)
        with pytest.raises(KeyboardInterrupt), service().canary(NEW, "run"):
            raise KeyboardInterrupt
    with pytest.raises(UserError):
        deployed(cluster, NEW, wrong)
    assert state(cluster) == (OLD, 100)


def test_a_cluster_without_kserve_or_the_right_to_it_is_named(cluster: FakeKubernetes) -> None:
    cluster.installed = False
    with pytest.raises(UserError, match="no InferenceServices") as caught, service().canary(NEW, "run"):
        pass
    assert caught.value.code == ExitCode.NOT_FOUND
    cluster.installed = True
    cluster.allowed.remove("create inferenceservices")
    with pytest.raises(UserError, match="not allowed to create a InferenceService") as caught:
        service().canary(NEW, "run").__enter__()
    assert caught.value.code == ExitCode.NO_PERMISSION


def test_the_fake_refuses_unknown_fields(cluster: FakeKubernetes, monkeypatch: pytest.MonkeyPatch) -> None:
    made = InferenceService._manifest

    def wrong_field(*arguments: Any) -> dict[str, Any]:
        body = made(*arguments)
        body["spec"]["predictor"]["canary"] = 10
        return body

    monkeypatch.setattr(InferenceService, "_manifest", wrong_field)
    with pytest.raises(ConfigError, match="unknown field"):
        service().canary(NEW, "run").__enter__()
