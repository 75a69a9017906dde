"""The stand-in for Vertex AI Model Registry is strict: uploads with one fault, versions and aliases."""

from __future__ import annotations

import copy
import http.client
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.fakes.vertex.server import FakeVertex

PARENT = "projects/test-project/locations/us-central1"
IMAGE = f"us-docker.pkg.dev/test-project/serving/vllm@sha256:{'1' * 64}"
BODY = {
    "modelId": "m",
    "model": {
        "displayName": "m",
        "artifactUri": "gs://bucket/model",
        "containerSpec": {"imageUri": IMAGE, "ports": [{"containerPort": 8080}]},
    },
}
REFUSALS: dict[str, tuple[tuple[str, ...], Any, int]] = {
    "unknown field": (("model", "aliases"), ["a"], 400),
    "unknown field, deep": (("model", "containerSpec", "port"), 8080, 400),
    "no display name": (("model", "displayName"), "", 400),
    "no container": (("model", "containerSpec"), None, 400),
    "image of Docker Hub": (("model", "containerSpec", "imageUri"), "vllm/vllm:1", 400),
    "artifacts on a disk": (("model", "artifactUri"), "/models/a", 400),
    "version of one's own": (("model", "versionId"), "7", 400),
    "label of capitals": (("model", "labels"), {"run": "Run.1"}, 400),
    "alias that is a number": (("model", "versionAliases"), ["7"], 400),
    "route without a slash": (("model", "containerSpec", "predictRoute"), "predict", 400),
    "id of capitals": (("modelId",), "Model", 400),
    "parent that is not there": (("parentModel",), f"{PARENT}/models/other", 400),
}


@pytest.fixture
def server() -> Iterator[FakeVertex]:
    with FakeVertex() as running:
        yield running


@pytest.mark.parametrize("name", REFUSALS)
def test_an_upload_with_one_fault_is_refused(server: FakeVertex, name: str) -> None:
    (*parents, last), value, code = REFUSALS[name]
    body: dict[str, Any] = copy.deepcopy(BODY)
    inner = body
    for parent in parents:
        inner = inner[parent]
    inner[last] = value
    assert ask(server, "POST", "models:upload", body)[0] == code
    assert server.models.models == {}


def test_models_versions_and_aliases_follow_the_api(server: FakeVertex) -> None:
    assert ask(server, "GET", "models/m")[0] == 404
    code, operation = ask(server, "POST", "models:upload", BODY)
    assert (code, operation.get("done")) == (200, None)
    polls = [ask(server, "GET", operation["name"].removeprefix(f"{PARENT}/"))[1].get("done") for _ in range(2)]
    assert polls == [None, True]
    assert ask(server, "POST", "models:upload", BODY)[0] == 409
    assert ask(server, "GET", "models/m@default")[1]["versionId"] == "1"
    assert ask(server, "GET", "models/m@champion")[0] == 404
    merge = [("m", ["a-b"]), ("m@2", ["a-b"]), ("m@1", []), ("m@1", ["7"]), ("m@1", ["-default"]), ("m@1", "a-b")]
    codes = [
        ask(server, "POST", f"models/{name}:mergeVersionAliases", {"versionAliases": aliases})[0]
        for name, aliases in merge
    ]
    assert codes == [400, 404, 400, 400, 400, 400]
    assert ask(server, "GET", "models/m:listVersions?filter=x")[0] == 501
    assert ask(server, "DELETE", "models/m")[0] == 501


def ask(server: FakeVertex, method: str, path: str, content: object = None) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection(server.endpoint.removeprefix("http://"), timeout=10)
    try:
        connection.request(method, f"/v1/{PARENT}/{path}", None if content is None else json.dumps(content))
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()
