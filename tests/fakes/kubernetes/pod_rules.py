"""What the Kubernetes API refuses of a pod's specification, as comments of its types say (kubernetes.client.models).

Names, labels and quantities are those of all objects. Rules without a comment there are in pkg/apis/core/validation of
github.com/kubernetes/kubernetes: mounts at one path, resources in pieces, and the characters of names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

LABEL_KEY = re.compile(
    r"(?=[^/]{1,253}/|[^/]*$)([a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?"
    r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
)
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
QUANTITY = re.compile(r"([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[numkMGTPE])?")
DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
SUBDOMAIN = re.compile(r"(?=.{1,253}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
SECRET_KEY = re.compile(r"(?!\.\.|\.$)[-._A-Za-z0-9]{1,253}")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
EFFECTS = ("", "NoSchedule", "PreferNoSchedule", "NoExecute")
LONGEST_ANNOTATIONS = 256 << 10  # bytes of all names and values
Json = dict[str, Any]


def labels_that_are_none(labels: dict[str, str], path: str) -> Iterator[str]:
    for key, value in labels.items():
        if not LABEL_KEY.fullmatch(key) or not LABEL_VALUE.fullmatch(value):
            yield f"{path}: Invalid value: {key}={value}"


def annotations_that_are_none(annotations: dict[str, str]) -> Iterator[str]:
    for key in annotations:
        if not LABEL_KEY.fullmatch(key):
            yield f"metadata.annotations: {key!r} is no qualified name"
    if sum(len(str(text).encode()) for pair in annotations.items() for text in pair) > LONGEST_ANNOTATIONS:
        yield f"metadata.annotations: Too long: may not be more than {LONGEST_ANNOTATIONS} bytes"


def quantities_that_are_none(resources: dict[str, dict[str, Any]]) -> Iterator[str]:
    for kind in ("requests", "limits"):
        for name, value in resources.get(kind, {}).items():
            if not QUANTITY.fullmatch(str(value)):
                yield f"resources.{kind}.{name}: Invalid value: {value!r}: no quantity"


def device_violations(resources: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Of resources that a plugin offers, such as GPUs: whole ones, as many requested as at most."""
    requests, limits = resources.get("requests", {}), resources.get("limits", {})
    for name in {one for one in {**requests, **limits} if "/" in one}:
        if str(requests.get(name, limits.get(name))) != str(limits.get(name)):
            yield f"resources.requests.{name}: must be equal to {name} limit of {limits.get(name)}"
        elif not str(limits[name]).isdecimal():
            yield f"resources.limits.{name}: must be an integer"


def env_violations(env: list[Json]) -> Iterator[str]:
    names = [one["name"] for one in env]
    if len(names) != len(set(names)) or not all(isinstance(one.get("value", ""), str) for one in env):
        yield "env: a name twice, or a value that is no text"
    for one in env:
        if not VARIABLE.fullmatch(one["name"]):
            yield f"env: {one['name']!r} must be a C identifier"
        if one.get("value") and one.get("valueFrom"):
            yield f"env.{one['name']}.valueFrom: may not be specified when `value` is not empty"
        reference = one.get("valueFrom", {}).get("secretKeyRef")
        if reference and not (SUBDOMAIN.fullmatch(reference["name"]) and SECRET_KEY.fullmatch(reference["key"])):
            yield f"env.{one['name']}.valueFrom.secretKeyRef: {reference}: no name and key of a secret"


def mount_violations(mounts: list[Json], volumes: list[Json]) -> Iterator[str]:
    paths = [one["mountPath"] for one in mounts]
    for path in sorted({path for path in paths if paths.count(path) > 1}):
        yield f"volumeMounts: Invalid value: {path!r}: must be unique"
    for path in paths:
        if ":" in path:
            yield f"volumeMounts: {path!r} must not contain ':'"
    known = {one["name"] for one in volumes}
    yield from (f"volumeMounts: Not found: {one['name']}" for one in mounts if one["name"] not in known)


def pod_violations(pod: Json) -> Iterator[str]:
    """Of a pod apart from its containers."""
    volumes = pod.get("volumes", [])
    names = [one["name"] for one in volumes]
    if len(set(names)) < len(names) or not all(map(DNS_LABEL.fullmatch, names)):
        yield "volumes: a name twice, or one that is no DNS label"
    for volume in volumes:
        claim = volume.get("persistentVolumeClaim", {}).get("claimName", "claim")
        if not SUBDOMAIN.fullmatch(claim):
            yield f"volumes.persistentVolumeClaim.claimName: {claim!r} is no DNS subdomain"
        if volume.get("emptyDir", {}).get("medium", "") not in ("", "Memory"):
            yield "volumes.emptyDir.medium: must be empty or Memory"
    for one in pod.get("tolerations", ()):
        operator = one.get("operator", "Equal")
        if operator not in ("Exists", "Equal") or (operator == "Equal" and not one.get("key")):
            yield f"tolerations: {one}: Equal with a key, or Exists"
        if operator == "Exists" and one.get("value"):
            yield f"tolerations: {one}: value must be empty when operator is Exists"
        if one.get("effect", "") not in EFFECTS:
            yield f"tolerations: {one}: Unsupported value: {one['effect']!r}"
        if one.get("key") and not LABEL_KEY.fullmatch(one["key"]):
            yield f"tolerations: {one['key']!r} is no qualified name"
    yield from labels_that_are_none(pod.get("nodeSelector", {}), "nodeSelector")
    if (account := pod.get("serviceAccountName")) and not SUBDOMAIN.fullmatch(account):
        yield f"serviceAccountName: {account!r} is no DNS subdomain"
    if pod.get("terminationGracePeriodSeconds", 0) < 0:
        yield "terminationGracePeriodSeconds: must be greater than or equal to 0"
