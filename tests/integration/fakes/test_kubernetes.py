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
from tests.fakes.kubernetes.pods import Course, Scene, pod
from tests.support.pipelines.train_jobs import made, pools

SERVICES = "/apis/serving.kserve.io/v1beta1/namespaces/team/inferenceservices"
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


def patched(job: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = replicated(job)["template"]["spec"]["template"]["spec"]
    return found


def mounts(job: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = containers(job)["volumeMounts"]
    return found


def secret(name: str, key: str, **more: str) -> dict[str, Any]:
    return {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": name, "key": key}}, **more}


def claim(name: str) -> dict[str, Any]:
    return {"name": "data", "persistentVolumeClaim": {"claimName": name}}


# Of the pods: the API takes the job, and no pod is ever made.
PODS_REFUSED: dict[str, tuple[Change, str]] = {
    "a variable that is no identifier": (lambda job: trainer(job).update(env=[{"name": "A-B"}]), "C identifier"),
    "a value and a secret": (lambda job: trainer(job).update(env=[secret("s", "k", value="x")]), "not empty"),
    "a secret's name in capitals": (lambda job: trainer(job).update(env=[secret("S", "k")]), "name and key"),
    "a secret's key with a slash": (lambda job: trainer(job).update(env=[secret("s", "a/b")]), "name and key"),
    "a secret's key of dots": (lambda job: trainer(job).update(env=[secret("s", "..")]), "name and key"),
    "other GPUs requested than at most": (
        lambda job: trainer(job)["resourcesPerNode"]["requests"].update({"nvidia.com/gpu": "2"}), "must be equal"
    ),
    "half a GPU": (
        lambda job: trainer(job).update(resourcesPerNode={"limits": {"nvidia.com/gpu": "500m"}}), "an integer"
    ),
    "two mounts at a path": (
        lambda job: (patched(job)["volumes"].append(claim("a")),
                     mounts(job).append({"name": "data", "mountPath": "/dev/shm"})), "must be unique"
    ),
    "a mount of no volume": (lambda job: mounts(job).append({"name": "x", "mountPath": "/x"}), "Not found: x"),
    "a mount with a colon": (lambda job: mounts(job)[0].update(mountPath="/a:b"), "must not contain"),
    "a claim in capitals": (lambda job: patched(job)["volumes"].append(claim("Data")), "no DNS subdomain"),
    "a claim with two dots": (lambda job: patched(job)["volumes"].append(claim("a..b")), "no DNS subdomain"),
    "a volume's name with a dot": (lambda job: patched(job)["volumes"][0].update(name="a.b"), "no DNS label"),
    "a medium that is none": (lambda job: patched(job)["volumes"][0]["emptyDir"].update(medium="SSD"), "medium"),
    "an effect that is none": (
        lambda job: patched(job)["tolerations"].append({"key": "a", "operator": "Exists", "effect": "No"}), "effect"
    ),
    "a taint's key that is none": (
        lambda job: patched(job)["tolerations"].append({"key": "a b", "operator": "Exists"}), "qualified name"
    ),
    "a node's label that is none": (lambda job: patched(job).update(nodeSelector={"a": "b c"}), "a=b c"),
    "an account in capitals": (lambda job: patched(job).update(serviceAccountName="Trainer"), "no DNS subdomain"),
    "less than no time to save": (
        lambda job: patched(job).update(terminationGracePeriodSeconds=-1), "greater than or equal to 0"
    ),
    "a pod's label that is none": (
        lambda job: replicated(job)["template"]["spec"]["template"]["metadata"].update(labels={"-a": "b"}), "-a=b"
    ),
    "a pod's name": (
        lambda job: replicated(job)["template"]["spec"]["template"]["metadata"].update(name="x"), "only labels"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PODS_REFUSED)
def test_a_job_whose_pods_would_never_be_made_is_refused(server: FakeKubernetes, call: Caller, name: str) -> None:
    change, said = PODS_REFUSED[name]
    job = copy.deepcopy(made(pools(1, 1, gpus=1)))
    change(job)
    found, words = call("POST", f"{PATH}?fieldValidation=Strict", job)
    assert (found, said in words, server.jobs) == (422, True, {}), words


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        (lambda job: job["spec"].update(podTemplateOverrides=[]), 400, 'unknown field \\"spec.podTemplateOverrides'),
        (lambda job: trainer(job).update(numprocpernode=1), 400, "spec.trainer.numprocpernode"),
        (lambda job: containers(job).update(image="x"), 400, "containers[0].image"),
        (lambda job: job.update(kind="PyTorchJob"), 400, "does not match the expected one"),
        (lambda job: job["metadata"].update(namespace="other"), 400, "does not match the namespace"),
        (lambda job: trainer(job).update(numNodes="2"), 422, "numNodes"),
        (lambda job: trainer(job).update(numProcPerNode="auto"), 422, "numProcPerNode"),
        (lambda job: trainer(job).update(numProcPerNode=0), 422, "greater than or equal to 1"),
        (lambda job: trainer(job).update(env=[{"name": "A"}, {"name": "A"}]), 422, "duplicate"),
        (lambda job: trainer(job)["resourcesPerNode"].update(limits={"cpu": "4 cores"}), 422, "no quantity"),
        (lambda job: job["spec"].update(activeDeadlineSeconds=-1), 422, "activeDeadlineSeconds"),
        (lambda job: job["metadata"].update(name="Digits"), 422, "RFC 1035"),
        (lambda job: job["metadata"].update(name="a" * 60), 422, "too long"),
        (lambda job: job["metadata"].update(labels={"a": "b c"}), 422, "Invalid value: a=b c"),
        (lambda job: job["metadata"].update(annotations={"run uri": "x"}), 422, "no qualified name"),
        (lambda job: job["metadata"].update(annotations={"a": "b" * (256 << 10)}), 422, "Too long"),
        (lambda job: trainer(job).update(args=["x"] * 129), 422, "at most 128 items"),
        (lambda job: trainer(job).update(args=["x" * 65_537]), 422, "at most 65536 characters"),
        (lambda job: trainer(job).update(env=[{"name": f"A{n}"} for n in range(129)]), 422, "too many entries"),
        (lambda job: job["spec"].update(managedBy="ours"), 422, "managedBy"),
        (lambda job: job["spec"]["runtimePatches"][0].update(manager="a/" + "b" * 252), 422, "too long"),
        (lambda job: patched(job).update(tolerations=[{"key": "a", "operator": "Exists"}] * 129), 422, "at most 128"),
        (lambda job: patched(job)["volumes"].append(patched(job)["volumes"][0]), 422, "each name once"),
        (lambda job: mounts(job).append({"name": "dshm", "mountPath": "/x"}), 422, "each name once"),
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
        ("DELETE", f"{PATH}/none?propagationPolicy=Later", 422),
        ("DELETE", f"{PATH}/none?force=true", 501),
        ("POST", f"{PATH}?fieldValidation=Sometimes", 422),
        ("GET", "/api/v1/namespaces/team/pods/none/log?container=node&timestamps=true&sinceTime=today", 400),
        ("GET", "/api/v1/namespaces/team/pods/none/log?container=node&timestamps=maybe", 400),
        ("GET", "/api/v1/namespaces/team/pods/none/log?container=node&timestamps=true&sinceSeconds=1", 501),
        ("GET", f"{SERVICES}/none", 404),
        ("PUT", f"{SERVICES}/none", 404),
        ("PATCH", f"{SERVICES}/none", 501),
        ("PUT", f"{PATH}/none", 501),
        ("GET", PATH.replace("team", "other") + "/x", 403),
        ("GET", "/api/v1/namespaces/team/pods", 501),
        ("GET", "/api/v1/namespaces/team/pods/none/log?container=node&timestamps=true", 404),
        ("GET", "/api/v1/namespaces/team/pods/none/log?container=main", 400),
        ("GET", "/api/v1/namespaces/team/secrets", 501),
    ],
)
def test_missing_and_unknown_values_are_not_guessed(call: Caller, method: str, path: str, code: int) -> None:
    body = made(pools(1, 1, gpus=1)) if method == "POST" else None
    assert call(method, path, body)[0] == code


# ---- logs


def test_the_log_of_a_container_that_has_not_started_or_never_ran_before_is_refused(
    server: FakeKubernetes, call: Caller
) -> None:
    logs = "/api/v1/namespaces/team/pods/{}/log?container={}&timestamps=true{}"
    server.run_pods["0" * 36] = {"step": None, "done": [("2026-11-22T20:00:00Z", "line")]}
    server.runs = [Course([Scene(pods=[pod(0)], logs={"pod-0": ["one"]})])]
    job = made(pools(1, 1, gpus=1))
    call("POST", f"{PATH}?fieldValidation=Strict", job)
    assert call("GET", logs.format("done", "main", "")) == (200, "2026-11-22T20:00:00Z line\n")
    for name, container, more, said in (
        ("step", "main", "", "is waiting to start: ContainerCreating"),
        ("done", "wait", "", "is not valid for pod done"),
        ("pod-0", "node", "&previous=true", "previous terminated container"),
    ):
        code, words = call("GET", logs.format(name, container, more))
        assert code == 400 and said in words, (name, words)


# ---- InferenceServices


def service() -> dict[str, Any]:
    container = {
        "name": "kserve-container", "image": "vllm", "args": ["--port=8080"], "ports": [{"containerPort": 8080}],
        "env": [{"name": "STORAGE_URI", "value": "gs://b/m"}], "resources": {"limits": {"nvidia.com/gpu": "1"}},
    }  # fmt: skip
    predictor = {"minReplicas": 1, "maxReplicas": 2, "containers": [container]}
    metadata = {"name": "chat", "annotations": {"serving.kserve.io/enable-tag-routing": "true"}}
    kind = {"apiVersion": "serving.kserve.io/v1beta1", "kind": "InferenceService"}
    return {**kind, "metadata": metadata, "spec": {"predictor": predictor}}


def predictor(body: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = body["spec"]["predictor"]
    return found


def inside(body: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = predictor(body)["containers"][0]
    return found


SERVICES_REFUSED: dict[str, tuple[Change, int, str]] = {
    "another kind": (lambda body: body.update(kind="Service"), 400, "does not match"),
    "another version": (lambda body: body.update(apiVersion="serving.kserve.io/v1alpha1"), 400, "does not match"),
    "another namespace": (lambda body: body["metadata"].update(namespace="other"), 400, "does not match the namespace"),
    "an unknown field of the object": (lambda body: body.update(status={}), 400, "unknown field"),
    "an unknown field of the predictor": (lambda body: predictor(body).update(replicas=1), 400, "replicas"),
    "an unknown field of the container": (lambda body: inside(body).update(gpu=1), 400, "containers.gpu"),
    "replicas as a text": (lambda body: predictor(body).update(minReplicas="1"), 422, "must be of type integer"),
    "no port": (lambda body: inside(body).update(ports=[{"containerPort": 0}]), 422, "between 1 and 65535"),
    "a port beyond the last": (
        lambda body: inside(body).update(ports=[{"containerPort": 65536}]), 422, "between 1 and 65535"
    ),
    "no quantity": (lambda body: inside(body)["resources"].update(limits={"cpu": "four"}), 422, "no quantity"),
    "an annotation's name with a space": (
        lambda body: body["metadata"].update(annotations={"a b": "c"}), 422, "no qualified name"
    ),
    "an annotation that is no text": (
        lambda body: body["metadata"]["annotations"].update(a=1), 403, "annotations: not texts"
    ),
    "a name in capitals": (lambda body: body["metadata"].update(name="Chat"), 403, "DNS label"),
    "a name of 64 characters": (lambda body: body["metadata"].update(name="a" * 64), 403, "DNS label"),
    "a share of more than all": (
        lambda body: predictor(body).update(canaryTrafficPercent=101), 403, "not from 0 to 100"
    ),
    "more replicas at least than at most": (
        lambda body: predictor(body).update(minReplicas=3), 403, "cannot be greater"
    ),
    "two containers": (
        lambda body: predictor(body)["containers"].append({"name": "other", "env": []}), 403, "one container"
    ),
    "a mount of no volume": (
        lambda body: inside(body).update(volumeMounts=[{"name": "shm", "mountPath": "/dev/shm"}]), 403, "shm"
    ),
    "a label with a space": (lambda body: body["metadata"].update(labels={"a": "b c"}), 422, "a=b c"),
    "annotations beyond 256 KiB": (
        lambda body: body["metadata"]["annotations"].update(a="x" * (256 << 10)), 422, "Too long"
    ),
    "another protocol": (
        lambda body: inside(body)["ports"][0].update(protocol="HTTP"), 422, "Unsupported value"
    ),
    "a version of what is not there": (
        lambda body: body["metadata"].update(resourceVersion="1"), 500, "should not be set"
    ),
    "fewer replicas than none": (lambda body: predictor(body).update(minReplicas=-1), 403, "MinReplicas"),
    "a share of less than none": (
        lambda body: predictor(body).update(canaryTrafficPercent=-1), 403, "not from 0 to 100"
    ),
    "a variable that is no C identifier": (
        lambda body: inside(body)["env"].append({"name": "A-B", "value": "1"}), 403, "C identifier"
    ),
    "a variable that KServe blocks": (
        lambda body: inside(body)["env"].append({"name": "PYTHONPATH", "value": "/a"}), 403, "security reasons"
    ),
    "a probe of no port": (
        lambda body: inside(body).update(readinessProbe={"httpGet": {"path": "/", "port": 0}}), 403, "readinessProbe"
    ),
    "a mount with a colon": (
        lambda body: inside(body).update(volumeMounts=[{"name": "a", "mountPath": "/a:b"}]), 403, "must not contain"
    ),
    "a volume's name in capitals": (
        lambda body: predictor(body).update(volumes=[{"name": "Shm", "emptyDir": {}}]), 403, "no DNS label"
    ),
    "a volume twice": (
        lambda body: predictor(body).update(volumes=[{"name": "shm", "emptyDir": {}}] * 2), 403, "a name twice"
    ),
    "a toleration of every key by Equal": (
        lambda body: predictor(body).update(tolerations=[{"operator": "Equal"}]), 403, "Equal with a key"
    ),
    "a toleration that exists with a value": (
        lambda body: predictor(body).update(tolerations=[{"key": "a", "operator": "Exists", "value": "b"}]), 403,
        "must be empty",
    ),
    "a variable twice": (lambda body: inside(body)["env"].append(inside(body)["env"][0]), 403, "a name twice"),
}  # fmt: skip


@pytest.mark.parametrize("name", SERVICES_REFUSED)
def test_a_service_with_one_fault_is_refused_and_not_made(server: FakeKubernetes, call: Caller, name: str) -> None:
    change, code, said = SERVICES_REFUSED[name]
    body = service()
    change(body)
    found, words = call("POST", f"{SERVICES}?fieldValidation=Strict", body)
    assert (found, said in words, server.inference_services.services) == (code, True, {}), words


def test_a_service_is_made_once_and_changed_in_its_newest_version_only(server: FakeKubernetes, call: Caller) -> None:
    strict = "?fieldValidation=Strict"
    assert [call("POST", SERVICES + strict, service())[0] for _ in range(2)] == [200, 409]
    live = json.loads(call("GET", f"{SERVICES}/chat")[1])
    changed = service()
    for version, code in (("", 422), ("7", 409), (live["metadata"]["resourceVersion"], 200)):
        changed["metadata"]["resourceVersion"] = version
        assert call("PUT", f"{SERVICES}/chat{strict}", changed)[0] == code
    assert call("PUT", f"{SERVICES}/chat{strict}", {**changed, "metadata": {"name": "other"}})[0] == 400
    live = json.loads(call("GET", f"{SERVICES}/chat")[1])["metadata"]
    mode = {"annotations": {"serving.kserve.io/deploymentMode": "Standard"}}
    for change, code, said in (({"uid": "another"}, 409, "UID"), (mode, 403, "cannot be changed")):
        found, words = call("PUT", f"{SERVICES}/chat{strict}", {**changed, "metadata": {**live, **change}})
        assert (found, said in words) == (code, True), words
    assert call("POST", SERVICES, service())[0] == 501, "without strict decoding, unknown fields are dropped in silence"
    server.allowed.remove("delete inferenceservices")
    assert call("DELETE", f"{SERVICES}/chat")[0] == 403


def test_a_request_without_a_token_is_refused(call: Caller) -> None:
    assert call("GET", f"{PATH}/x", token="another")[0] == 401
