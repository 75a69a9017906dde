"""What the Kubernetes API and Kubeflow Trainer 2.3 refuse of a TrainJob: the API's own types, and the rules behind.

Types: kubeflow_trainer_api, generated from the API's OpenAPI. Rules: the CRD's (pkg/apis/trainer/v1alpha1/
trainjob_types.go) and the validating webhook's (pkg/runtime/framework/plugins) in github.com/kubeflow/trainer, as far
as a TrainJob of ours can break them; and those of the pods that are made from it (pod_rules.py).
"""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ValidationError

from tests.fakes.kubernetes import pod_rules

JOB_NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
MANAGER = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9/._-]+")
RESERVED = {"PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"}
LONGEST_IMAGE, LONGEST_WORD, LONGEST_HOST = 500, 65_536, 63
MAX_ITEMS, MAX_PATCHES, LONGEST_MANAGER = 128, 16, 253
CONTROLLERS = ("trainer.kubeflow.org/trainjob-controller", "kueue.x-k8s.io/multikueue")
NODE = "node"


def unknown_fields(body: dict[str, Any]) -> list[str]:
    """Fields that no version of the API has: `fieldValidation=Strict` refuses them."""
    from kubeflow_trainer_api import models  # a second: whoever collects tests imports this module

    return unknown_in(models.TrainerV1alpha1TrainJob, body)


def fields_named(value: Any, names: set[str], path: str) -> list[str]:
    """Where fields of these names are, at any depth."""
    if isinstance(value, list):
        return [found for index, one in enumerate(value) for found in fields_named(one, names, f"{path}[{index}]")]
    if not isinstance(value, dict):
        return []
    here = [f"{path}.{key}" for key in value if key in names]
    return here + [found for key, one in value.items() for found in fields_named(one, names, f"{path}.{key}")]


def unknown_in(model: type[BaseModel], body: dict[str, Any]) -> list[str]:
    """Fields of `body` that this type of the API has not."""
    return list(_unknown(model, body, ""))


def violations(body: dict[str, Any]) -> list[str]:
    """What the CRD's schema and rules refuse (422)."""
    from kubeflow_trainer_api import models

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
    yield from pod_rules.labels_that_are_none(metadata.get("labels", {}), "metadata.labels")
    yield from pod_rules.annotations_that_are_none(metadata.get("annotations", {}))


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
    words = [*trainer.get("command", ()), *trainer.get("args", ())]
    if max(len(trainer.get(name, ())) for name in ("command", "args")) > MAX_ITEMS:
        yield f"spec.trainer: Too many: command and args have at most {MAX_ITEMS} items"
    if any(len(word) > LONGEST_WORD for word in words):
        yield f"spec.trainer: Too long: a word of command and args has at most {LONGEST_WORD} characters"
    names = [one["name"] for one in trainer.get("env", ())]
    if len(set(names)) < len(names) or len(names) > MAX_ITEMS:
        yield "spec.trainer.env: duplicate or too many entries"
    yield from pod_rules.quantities_that_are_none(trainer.get("resourcesPerNode", {}))
    if spec.get("managedBy", CONTROLLERS[0]) not in CONTROLLERS:
        yield f"spec.managedBy: must be one of {CONTROLLERS}"
    for pod in pod_patches(spec):
        listed = [pod.get("volumes", ()), *(one.get("volumeMounts", ()) for one in pod.get("containers", ()))]
        if any(len({one["name"] for one in entries}) < len(entries) for entries in listed):
            yield "spec.runtimePatches: Duplicate value: volumes and volumeMounts have each name once"
        if max(map(len, [*listed, pod.get("tolerations", ())])) > MAX_ITEMS:
            yield f"spec.runtimePatches: Too many: at most {MAX_ITEMS} items"
    managers = [one["manager"] for one in spec.get("runtimePatches", ())]
    if len(set(managers)) < len(managers) or len(managers) > MAX_PATCHES:
        yield "spec.runtimePatches: duplicate manager, or too many"
    if any(len(one) > LONGEST_MANAGER for one in managers):
        yield "spec.runtimePatches.manager: too long"


def pod_patches(spec: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The parts of the pods that a TrainJob changes."""
    yield from (template.get("spec", {}) for template in _templates(spec))


def _templates(spec: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for patch in spec.get("runtimePatches", ()):
        jobs = patch.get("trainingRuntimeSpec", {}).get("template", {}).get("spec", {}).get("replicatedJobs", ())
        yield from (job.get("template", {}).get("spec", {}).get("template", {}) for job in jobs)


def pod_violations(job: dict[str, Any]) -> list[str]:
    """What would keep every pod of the job from being made.

    The real API takes such a TrainJob, and its nodes never come.
    """
    spec = job["spec"]
    trainer = spec.get("trainer", {})
    found = list(filter(None, [pod_name_violation(job["metadata"]["name"], trainer.get("numNodes", 1))]))
    found += pod_rules.env_violations(trainer.get("env", []))
    found += pod_rules.device_violations(trainer.get("resourcesPerNode", {}))
    for template in _templates(spec):
        pod, metadata = template.get("spec", {}), template.get("metadata", {})
        if others := metadata.keys() - {"labels", "annotations"}:
            found.append(f"metadata: only labels and annotations are allowed, not {sorted(others)}")
        found += pod_rules.labels_that_are_none(metadata.get("labels", {}), "template.metadata.labels")
        found += pod_rules.pod_violations(pod)
        for container in pod.get("containers", ()):
            found += pod_rules.mount_violations(container.get("volumeMounts", []), pod.get("volumes", []))
    return found


def pod_name_violation(name: str, nodes: int) -> str:
    """JobSet's rule: what it calls the last pod must be a host's name. "" when it is."""
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
