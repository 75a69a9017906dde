"""The stand-in refuses what comments of the API's messages refuse, wherever in a request the message stands.

Faults are made from the comments themselves: a field that begins with "Required." is left out, one that begins with
"Output only." is set, a name is too long, labels and keys are no such. A field that a later SDK adds is met here.
"""

from __future__ import annotations

import copy
import inspect
import json
import re
from collections.abc import Callable, Iterator
from email.message import Message
from typing import Any

import proto
import pytest
from google.cloud.aiplatform_v1 import types as api
from google.protobuf.descriptor import FieldDescriptor

from tests.fakes.vertex.server import FakeVertex
from vlmpipe.rehearsal.http_server import ApiError

Json = dict[str, Any]
PARENT = "/v1/projects/test-project/locations/us-central1"
ROOT = PARENT.removeprefix("/v1/")
MACHINE = {"machineType": "g2-standard-8", "acceleratorType": "NVIDIA_L4", "acceleratorCount": 1}
KEY = {"kmsKeyName": f"{ROOT.replace('test-project', 'p')}/keyRings/r/cryptoKeys/k"}
VARIABLE = {"name": "A", "value": "1"}
PRIVATE = {
    "networkAttachment": "attachment",
    "dnsPeeringConfigs": [{"domain": "corp.example.", "targetProject": "p", "targetNetwork": "n"}],
}
POOL: Json = {
    "machineSpec": {**MACHINE, "reservationAffinity": {"reservationAffinityType": "ANY_RESERVATION"}},
    "replicaCount": 1,
    "containerSpec": {"imageUri": "us-docker.pkg.dev/p/r/trainer:1", "env": [VARIABLE]},
    "nfsMounts": [{"server": "10.0.0.2", "path": "/a", "mountPoint": "m"}],
}
PACKAGE_POOL: Json = {
    **{name: value for name, value in POOL.items() if name != "containerSpec"},
    "pythonPackageSpec": {
        "executorImageUri": "us-docker.pkg.dev/p/r/trainer:1", "packageUris": ["gs://b/p.tar.gz"], "pythonModule": "m",
        "env": [VARIABLE],
    },
}  # fmt: skip
SPEC: Json = {
    "workerPoolSpecs": [POOL, PACKAGE_POOL],
    "pscInterfaceConfig": PRIVATE,
    "baseOutputDirectory": {"outputUriPrefix": "gs://bucket/folder"},
}
COMMON: Json = {"displayName": "name", "labels": {"team": "vision"}, "encryptionSpec": KEY}
PIPELINE: Json = {
    **COMMON,
    "pipelineSpec": {
        "schemaVersion": "2.1.0",
        "root": {"dag": {"tasks": {"a": {"taskInfo": {"name": "a"}, "componentRef": {"name": "comp-a"}}}}},
    },
    "runtimeConfig": {"gcsOutputDirectory": "gs://bucket/root"},
    "pscInterfaceConfig": PRIVATE,
}
# What each method gets: a good request with every message that vlmpipe sends, and its type.
REQUESTS: dict[str, tuple[str, Any, Json]] = {
    "custom job": ("customJobs", api.CustomJob, {**COMMON, "jobSpec": SPEC}),
    "tuning job": (
        "hyperparameterTuningJobs", api.HyperparameterTuningJob,
        {
            **COMMON, "maxTrialCount": 2, "parallelTrialCount": 1, "trialJobSpec": SPEC,
            "studySpec": {
                "metrics": [{"metricId": "loss", "goal": "MINIMIZE"}],
                "parameters": [
                    {"parameterId": "rate", "doubleValueSpec": {"minValue": 0.1, "maxValue": 1.0}},
                    {"parameterId": "rank", "integerValueSpec": {"minValue": "1", "maxValue": "4"}},
                    {"parameterId": "kind", "categoricalValueSpec": {"values": ["a"]}},
                    {"parameterId": "size", "discreteValueSpec": {"values": [1.0, 2.0]}},
                ],
            },
        },
    ),
    "pipeline job": ("pipelineJobs?pipelineJobId=a-job", api.PipelineJob, PIPELINE),
    "schedule": (
        "schedules", api.Schedule,
        {
            "displayName": "name", "cron": "0 3 * * 1", "maxConcurrentRunCount": "1",
            "createPipelineJobRequest": {"parent": ROOT, "pipelineJob": PIPELINE},
        },
    ),
    "model": (
        "models:upload", api.UploadModelRequest,
        {
            "modelId": "another",
            "model": {
                **COMMON, "artifactUri": "gs://bucket/model",
                "containerSpec": {
                    "imageUri": "us-docker.pkg.dev/p/r/vllm:1", "env": [VARIABLE], "ports": [{"containerPort": 8080}],
                },
            },
        },
    ),
    "endpoint": ("endpoints?endpointId=another", api.Endpoint, COMMON),
    "deployment": (
        "endpoints/known:deployModel", api.DeployModelRequest,
        {
            "deployedModel": {
                "model": f"{ROOT}/models/known@1",
                "dedicatedResources": {"machineSpec": MACHINE, "minReplicaCount": 1},
            },
        },
    ),
    "removal": ("endpoints/known:undeployModel", api.UndeployModelRequest, {"deployedModelId": "70"}),
    "aliases": (
        "models/known@1:mergeVersionAliases", api.MergeVersionAliasesRequest, {"versionAliases": ["champion"]},
    ),
    "context": (
        "metadataStores/default/contexts?contextId=another", api.Context,
        {
            "displayName": "name", "labels": {"team": "vision"}, "schemaTitle": "system.Experiment",
            "schemaVersion": "0.0.1",
        },
    ),
}  # fmt: skip
IN_ADDRESS = {"parent", "endpoint", "name", "context"}  # of a request; the stand-in reads them there
ZERO_IS_A_VALUE = {"min_value", "max_value"}  # a number that is left out is 0


@pytest.fixture
def server() -> Iterator[FakeVertex]:
    """A metadata store, a model, and an endpoint to which it is deployed."""
    with FakeVertex() as running:
        running.metadata.has_store = True
        send(running, "models:upload", {**REQUESTS["model"][2], "modelId": "known"})
        send(running, "endpoints?endpointId=known", COMMON)
        deployed = {**REQUESTS["deployment"][2]["deployedModel"], "id": "70"}
        send(running, "endpoints/known:deployModel", {"deployedModel": deployed})
        yield running


def send(server: FakeVertex, path: str, content: Json) -> None:
    path, _, query = path.partition("?")
    options = dict(one.split("=") for one in query.split("&") if one)
    server.answer("POST", f"{PARENT}/{path}", options, Message(), json.dumps(content).encode())


def comments(kind: type[proto.Message]) -> dict[str, str]:
    """The comment of each field, from the message's docstring."""
    found: dict[str, list[str]] = {}
    name = ""
    for line in inspect.cleandoc(kind.__doc__ or "").partition("Attributes:")[2].splitlines():
        if start := re.fullmatch(r" {4}(\w+) \(.*", line):
            name = start[1].rstrip("_")
            found[name] = []
        elif name and line.startswith(" " * 8):
            found[name].append(line.strip())
    return {field: " ".join(lines) for field, lines in found.items()}


Fault = tuple[str, Callable[[Json], object]]


def faults(kind: type[proto.Message], content: Json, path: str = "") -> Iterator[Fault]:
    """Changes of the part of a request at `path`, each with its name."""
    said = comments(kind)
    for field in kind.pb(kind()).DESCRIPTOR.fields:
        comment, key, where = said.get(field.name, ""), field.json_name, f"{path}{field.name}"
        in_address = field.name in IN_ADDRESS and not path
        if comment.startswith("Required.") and not in_address and field.name not in ZERO_IS_A_VALUE:
            assert key in content, f"the good request lacks {where}, which is required"
            yield f"{where} is missing", lambda part, key=key: part.pop(key)
        if comment.startswith("Output only."):
            yield f"{where} is set", lambda part, key=key, field=field: part.update({key: value_of(field)})
        if key not in content:
            continue
        wrong: list[Any] = []
        if "up to 128 characters" in comment:
            wrong = ["x" * 129]
        elif field.name == "labels":
            wrong = [{"Team": "v"}, {"team": "Vision"}, {f"k{number}": "v" for number in range(65)}]
        elif field.name == "kms_key_name":
            wrong = ["k", content[key].replace("us-central1", "us-east1")]
        elif "valid C identifier" in comment:
            wrong = ["A-B"]
        elif "Must end with a dot" in comment:
            wrong = ["corp.example"]
        elif "start with '/'" in comment:
            wrong = ["a"]
        elif "Google Cloud Storage URI" in comment:
            wrong = ["bucket/folder"]
        for value in wrong:
            yield f"{where} is {str(value)[:40]}", lambda part, k=key, v=value: part.update({k: v})


def value_of(field: FieldDescriptor) -> Any:
    """A value of the field's type."""
    value: Any = {
        FieldDescriptor.CPPTYPE_STRING: "x", FieldDescriptor.CPPTYPE_BOOL: True, FieldDescriptor.CPPTYPE_ENUM: 1,
        FieldDescriptor.CPPTYPE_MESSAGE: {},
    }.get(field.cpp_type, 1)  # fmt: skip
    if field.message_type and field.message_type.full_name == "google.protobuf.Timestamp":
        value = "2026-01-01T00:00:00Z"
    if field.message_type and field.message_type.GetOptions().map_entry:
        return {"a": value_of(field.message_type.fields_by_name["value"])}
    return [value] if field.is_repeated else value


def parts(kind: type[proto.Message], content: Json, path: str = "", keys: tuple[Any, ...] = ()) -> Iterator[Any]:
    """Each message in the content with its type, its path in words, and the keys that lead to it."""
    yield kind, content, path, keys
    for name, field in kind.meta.fields.items():
        value = content.get(field.descriptor.json_name or name) or content.get(_camel(name))
        inner = field.message
        if not value or not (inspect.isclass(inner) and issubclass(inner, proto.Message)):
            continue
        for place, one in enumerate(value) if isinstance(value, list) else [(None, value)]:
            below = (*keys, _camel(name)) if place is None else (*keys, _camel(name), place)
            if isinstance(one, dict):
                yield from parts(inner, one, f"{path}{name}{'' if place is None else f'[{place}]'}.", below)


def _camel(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(word.title() for word in others)


def cases() -> Iterator[tuple[str, str, Json]]:
    for request, (_, kind, good) in REQUESTS.items():
        for part_kind, content, path, keys in parts(kind, good):
            for name, change in faults(part_kind, content, path):
                changed = copy.deepcopy(good)
                part = changed
                for key in keys:
                    part = part[key]
                change(part)
                yield request, name, changed


def test_the_requests_that_are_changed_are_good(server: FakeVertex) -> None:
    for path, _, content in REQUESTS.values():
        send(server, path, content)


def test_every_fault_that_a_comment_names_is_refused(server: FakeVertex) -> None:
    passed, count = [], 0
    for request, name, changed in cases():
        count += 1
        try:
            send(server, REQUESTS[request][0], changed)
        except ApiError as error:
            if error.code == 400:
                continue
        passed.append(f"{request}: {name}")
    assert count > 150
    assert not passed, "\n".join(passed)
