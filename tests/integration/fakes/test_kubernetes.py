"""The fake Kubernetes API is strict: it refuses what the real one does, as far as a TrainJob of ours can meet it."""

from __future__ import annotations

import copy
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.fakes.kubernetes.api import TOKEN, FakeKubernetes
from tests.fakes.kubernetes.pods import Course, Scene
from tests.support.pipelines.train_jobs import made, pools

PATH = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/team/trainjobs"
Change = Callable[[dict[str, Any]], object]


class Caller:
    """Plain HTTP, so that nothing of the client that is tested elsewhere stands between."""

    def __init__(self, server: FakeKubernetes, folder: Path) -> None:
        self._address = yaml.safe_load(server.kubeconfig(folder).read_text())["clusters"][0]["cluster"]["server"]

    def __call__(self, method: str, path: str, body: Any = None, token: str = TOKEN) -> tuple[int, str]:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {token}"}
        request = urllib.request.Request(self._address + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()


@pytest.fixture
def server() -> Iterator[FakeKubernetes]:
    with FakeKubernetes() as running:
        running.runs = [Course([Scene()])]
        yield running


@pytest.fixture
def call(server: FakeKubernetes, tmp_path: Path) -> Caller:
    return Caller(server, tmp_path)


def trainer(job: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = job["spec"]["trainer"]
    return found


def replicated(job: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = job["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]
    return found["replicatedJobs"][0]


def containers(job: dict[str, Any]) -> dict[str, Any]:
    return replicated(job)["template"]["spec"]["template"]["spec"]["containers"][0]


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        (lambda job: job["spec"].update(podTemplateOverrides=[]), 400, 'unknown field \\"spec.podTemplateOverrides'),
        (lambda job: trainer(job).update(numprocpernode=1), 400, "spec.trainer.numprocpernode"),
        (lambda job: containers(job).update(image="x"), 400, "containers[0].image"),
        (lambda job: job.update(kind="PyTorchJob"), 400, "does not match the expected one"),
        (lambda job: trainer(job).update(numNodes="2"), 422, "numNodes"),
        (lambda job: trainer(job).update(numProcPerNode="auto"), 422, "numProcPerNode"),
        (lambda job: trainer(job).update(numProcPerNode=0), 422, "greater than or equal to 1"),
        (lambda job: trainer(job).update(env=[{"name": "A"}, {"name": "A"}]), 422, "duplicate"),
        (lambda job: trainer(job)["resourcesPerNode"].update(limits={"cpu": "4 cores"}), 422, "no quantity"),
        (lambda job: job["spec"].update(activeDeadlineSeconds=-1), 422, "activeDeadlineSeconds"),
        (lambda job: job["metadata"].update(name="Digits"), 422, "RFC 1035"),
        (lambda job: job["metadata"].update(name="a" * 60), 422, "too long"),
        (lambda job: job["metadata"].update(labels={"a": "b c"}), 422, "Invalid value: a=b c"),
        (lambda job: job["spec"]["runtimeRef"].update(name="jax"), 403, "must be created before"),
        (lambda job: job["spec"]["runtimePatches"][0].update(manager="vlmpipe"), 403, "domain-prefixed"),
        (lambda job: trainer(job).update(env=[{"name": "PET_NNODES"}]), 403, "reserved envs"),
        (lambda job: replicated(job).update(name="worker"), 403, "doesn't exist in the runtime job template"),
        (lambda job: containers(job).update(env=[{"name": "A"}]), 403, "must not have envs"),
    ],
)  # fmt: skip
def test_a_job_that_the_api_refuses_is_refused(
    server: FakeKubernetes, call: Caller, change: Change, code: int, said: str
) -> None:
    job = copy.deepcopy(made(pools(1, 1, gpus=1)))
    change(job)
    found, words = call("POST", f"{PATH}?fieldValidation=Strict", job)
    assert (found, server.jobs) == (code, {}) and said in words


def test_a_job_that_the_api_takes_is_taken_once(server: FakeKubernetes, call: Caller) -> None:
    job = made(pools(1, 1, gpus=1))
    assert call("POST", f"{PATH}?fieldValidation=Strict", job)[0] == 200
    assert call("POST", f"{PATH}?fieldValidation=Strict", job)[0] == 409
    assert list(server.jobs) == [job["metadata"]["name"]]


@pytest.mark.parametrize(
    ("method", "path", "code"),
    [
        ("GET", f"{PATH}/none", 404),
        ("DELETE", f"{PATH}/none", 404),
        ("PUT", f"{PATH}/none", 501),
        ("GET", PATH.replace("team", "other") + "/x", 403),
        ("GET", "/api/v1/namespaces/team/pods", 501),
        ("GET", "/api/v1/namespaces/team/pods/none/log?container=node&timestamps=true", 404),
        ("GET", "/api/v1/namespaces/team/pods/none/log?container=main", 400),
        ("GET", "/api/v1/namespaces/team/secrets", 501),
    ],
)
def test_missing_and_unknown_values_are_not_guessed(call: Caller, method: str, path: str, code: int) -> None:
    assert call(method, path)[0] == code


def test_a_request_without_a_token_is_refused(call: Caller) -> None:
    assert call("GET", f"{PATH}/x", token="another")[0] == 401
