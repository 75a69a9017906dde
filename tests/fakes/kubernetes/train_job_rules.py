"""What the Kubernetes API and Kubeflow Trainer 2.3 refuse of a TrainJob: the API's own types, and the rules behind.

Types: kubeflow_trainer_api, generated from the API's OpenAPI. Rules: the CRD's (pkg/apis/trainer/v1alpha1/
trainjob_types.go) and the validating webhook's (pkg/runtime/framework/plugins) in github.com/kubeflow/trainer, as far
as a TrainJob of ours can break them.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator
from typing import Any

from kubeflow_trainer_api import models
from pydantic import BaseModel, ValidationError

JOB_NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
LABEL_KEY = re.compile(r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
QUANTITY = re.compile(r"([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[numkMGTPE])?")
MANAGER = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9/._-]+")
RESERVED = {"PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"}
LONGEST_IMAGE, MAX_ITEMS, LONGEST_HOST = 500, 128, 63
NODE = "node"


def unknown_fields(body: dict[str, Any]) -> list[str]:
    """Fields that no version of the API has: `fieldValidation=Strict` refuses them."""
    return unknown_in(models.TrainerV1alpha1TrainJob, body)


def unknown_in(model: type[BaseModel], body: dict[str, Any]) -> list[str]:
    """Fields of `body` that this type of the API has not."""
    return list(_unknown(model, body, ""))


def violations(body: dict[str, Any]) -> list[str]:
    """What the CRD's schema and rules refuse (422)."""
    try:
        models.TrainerV1alpha1TrainJob.from_dict(body)
    except ValidationError as error:
        return [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()]
    return [*_metadata(body["metadata"]), *_spec(body["spec"])]


def denials(body: dict[str, Any], runtimes: set[str]) -> list[str]:
    """What Trainer's webhook denies (403)."""
    spec = body["spec"]
    found = []
    if spec["runtimeRef"].get("kind", "ClusterTrainingRuntime") != "ClusterTrainingRuntime":
        found.append(f"unsupported runtime: {spec['runtimeRef']}")
    elif spec["runtimeRef"]["name"] not in runtimes:
        text = "specified clusterTrainingRuntime must be created before the TrainJob is created"
        found.append(f"spec.RuntimeRef: Invalid value: {spec['runtimeRef']}: {text}")
    taken = sorted({one["name"] for one in spec.get("trainer", {}).get("env", ())} & RESERVED)
    if taken:
        found.append(f"spec.trainer.env: Invalid value: must not have reserved envs, invalid envs configured: {taken}")
    for patch in spec.get("runtimePatches", ()):
        if not MANAGER.fullmatch(patch["manager"]):
            found.append(f"spec.runtimePatches.manager: {patch['manager']!r} must be a domain-prefixed path")
        jobs = patch.get("trainingRuntimeSpec", {}).get("template", {}).get("spec", {}).get("replicatedJobs", ())
        for job in jobs:
            if job["name"] != NODE:
                found.append("must not have replicated job that doesn't exist in the runtime job template")
            pod = job.get("template", {}).get("spec", {}).get("template", {}).get("spec", {})
            for container in pod.get("containers", ()):
                if container["name"] != NODE:
                    found.append(f"must not have container that doesn't exist in the runtime job {job['name']}")
                elif container.get("env"):
                    found.append("must not have envs for the dataset-initializer, model-initializer, node containers")
    return found


def _metadata(metadata: dict[str, Any]) -> Iterator[str]:
    if not JOB_NAME.fullmatch(metadata.get("name", "")):
        yield "metadata.name must match RFC 1035 DNS label format and be no more than 63 characters"
    yield from labels_that_are_none(metadata.get("labels", {}), "metadata.labels")
    for key in metadata.get("annotations", {}):
        if not LABEL_KEY.fullmatch(key):
            yield f"metadata.annotations: {key!r} is no qualified name"


def labels_that_are_none(labels: dict[str, str], path: str) -> Iterator[str]:
    for key, value in labels.items():
        if not LABEL_KEY.fullmatch(key) or not LABEL_VALUE.fullmatch(value):
            yield f"{path}: Invalid value: {key}={value}"


def _spec(spec: dict[str, Any]) -> Iterator[str]:
    trainer = spec.get("trainer", {})
    if not 1 <= len(spec["runtimeRef"].get("name", "")) <= 253:
        yield "spec.runtimeRef.name: should be at least 1 chars long"
    if spec.get("activeDeadlineSeconds", 1) < 1:
        yield "spec.activeDeadlineSeconds: should be greater than or equal to 1"
    if trainer.get("numProcPerNode", 1) < 1:
        yield "numProcPerNode must be greater than or equal to 1"
    if trainer.get("numNodes", 0) < 0 or len(trainer.get("image", "")) > LONGEST_IMAGE:
        yield "spec.trainer: numNodes or image out of bounds"
    names = [one["name"] for one in trainer.get("env", ())]
    if len(set(names)) < len(names) or len(names) > MAX_ITEMS:
        yield "spec.trainer.env: duplicate or too many entries"
    for kind in ("requests", "limits"):
        for name, value in trainer.get("resourcesPerNode", {}).get(kind, {}).items():
            if not QUANTITY.fullmatch(str(value)):
                yield f"spec.trainer.resourcesPerNode.{kind}.{name}: Invalid value: {value!r}: no quantity"
    managers = [one["manager"] for one in spec.get("runtimePatches", ())]
    if len(set(managers)) < len(managers):
        yield "spec.runtimePatches: duplicate manager"


def pod_name_violation(name: str, nodes: int) -> str:
    """JobSet's rule: what it calls the last pod must be a host's name. "" when it is.

    The real API takes such a TrainJob, and its nodes never come.
    """
    longest = f"{name}-{NODE}-0-{max(0, nodes - 1)}-abcde"
    return f"JobSet name is too long: pod {longest} is no host's name" if len(longest) > LONGEST_HOST else ""


def _unknown(model: type[BaseModel], value: Any, path: str) -> Iterator[str]:
    if not isinstance(value, dict) or "actual_instance" in model.model_fields:
        return
    known = {field.alias or name: field.annotation for name, field in model.model_fields.items()}
    for key, inner in value.items():
        where = f"{path}.{key}" if path else key
        if key not in known:
            yield where
        elif (kind := _model_in(known[key])) is None:
            continue
        elif isinstance(inner, list):
            for index, item in enumerate(inner):
                yield from _unknown(kind, item, f"{where}[{index}]")
        elif not _is_mapping(known[key]):
            yield from _unknown(kind, inner, where)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_model_in, typing.get_args(annotation))), None)


def _is_mapping(annotation: Any) -> bool:
    return typing.get_origin(annotation) is dict or any(map(_is_mapping, typing.get_args(annotation)))
