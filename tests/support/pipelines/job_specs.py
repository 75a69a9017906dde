"""Valid job specs for tests, and changed copies of them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from vlmpipe.job_spec.schema import camel_case

DIGEST = "@sha256:" + 64 * "a"
IMAGE = f"us-central1-docker.pkg.dev/example-project/vlmpipe/trainer{DIGEST}"
BUILT = f"us-central1-docker.pkg.dev/example-project/vlmpipe/built{DIGEST}"
TORCH_BUILDS = {BUILT: "cu130"}  # of images of which it is known
REDUCERS = "us-docker.pkg.dev/vertex-ai-restricted/training/reductionserver:latest"
NETWORK = "projects/123456789012/global/networks/training"
# Made up, in the form of real ones.
HUB_TOKEN = "hf_" + "Qw3rTy" * 6
RANDOM_SECRET = "aZ3kP9xQ7mB2vN8sL5tR1wY6uE4cH0dJ"
HEX_KEY = "0123456789abcdef0123456789abcdef01234567"

Spec = dict[str, Any]
ABSENT = object()  # a field to take away


def pool(machine_type: str, accelerator_type: str = "", accelerator_count: int = 0, replica_count: int = 1) -> Spec:
    """A pool that trains."""
    machine: Spec = {"machine_type": machine_type}
    if accelerator_type:
        machine |= {"accelerator_type": accelerator_type, "accelerator_count": accelerator_count}
    return {
        "machine_spec": machine,
        "replica_count": replica_count,
        "container_spec": {
            "image_uri": IMAGE,
            "command": ["python", "-m", "vlmpipe.trainer.launch"],
            "args": ["--seed", "1"],
        },
    }


def job(*pools: Spec) -> Spec:
    """A job of these pools with nothing to complain about."""
    return {
        "worker_pool_specs": list(pools),
        "scheduling": {"timeout": "86400s", "restart_job_on_worker_restart": True},
        "service_account": "trainer@example-project.iam.gserviceaccount.com",
        "base_output_directory": {"output_uri_prefix": "gs://example-bucket/run"},
    }


def a100(replica_count: int = 1) -> Spec:
    """A pool of the machines that most fixtures use."""
    return pool("a2-highgpu-8g", "NVIDIA_TESLA_A100", 8, replica_count)


def reducers() -> Spec:
    return {
        "machine_spec": {"machine_type": "n1-highcpu-16"},
        "replica_count": 25,  # 800 Gbit/s, for up to 8 nodes of 100
        "container_spec": {"image_uri": REDUCERS},
    }


CPU = job(pool("n1-standard-8"))
ONE = job(a100())
CLUSTER = job(a100(), a100(3))
REDUCED = job(a100(), a100(3), reducers())
TPU_POOL = pool("ct5lp-hightpu-4t") | {
    "machine_spec": {"machine_type": "ct5lp-hightpu-4t", "tpu_topology": "2x2"},
    "container_spec": {"image_uri": IMAGE, "command": ["python", "-m", "their_trainer.train"]},
}
TPU = job(TPU_POOL)
MEGA_ONE = job(pool("a3-megagpu-8g", "NVIDIA_H100_MEGA_80GB", 8))
ULTRA = job(pool("a3-ultragpu-8g", "NVIDIA_H200_141GB", 8))
MEGA = job(*(pool("a3-megagpu-8g", "NVIDIA_H100_MEGA_80GB", 8) for _ in range(2)))
PACKAGE = {
    "executor_image_uri": "us-docker.pkg.dev/vertex-ai/training/pytorch-gpu.2-4.py310:latest",
    "package_uris": ["gs://example-bucket/trainer.tar.gz"],
    "python_module": "trainer.task",
}


@dataclass(frozen=True)
class Case:
    """Changes to `base` that break the rule `code` and no other, and changes close by that break none."""

    code: str
    broken: Mapping[str, Any]
    neighbour: Mapping[str, Any]
    base: Spec = field(default_factory=lambda: ONE)
    region: str = ""


P0, P1, P2 = (f"worker_pool_specs.{index}" for index in range(3))
MACHINE, CONTAINER, DISK = f"{P0}.machine_spec", f"{P0}.container_spec", f"{P0}.disk_spec"
EIGHT = ("--nproc_per_node", "8")


def started(*words: str) -> dict[str, Any]:
    """The words that start pool 0's program."""
    return {f"{CONTAINER}.command": list(words), f"{CONTAINER}.args": []}


def in_camel_case(value: Any) -> Any:
    """The content with field names as the REST API writes them."""
    if isinstance(value, dict):
        return {camel_case(name): in_camel_case(inner) for name, inner in value.items()}
    return [in_camel_case(inner) for inner in value] if isinstance(value, list) else value


def changed(spec: Spec, changes: Mapping[str, Any]) -> Spec:
    """A copy with fields set or, with ABSENT, taken away. Paths are dotted, numbers are positions in lists."""
    spec = copy.deepcopy(spec)
    for path, value in changes.items():
        place: Any = spec
        *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
        for part in parents:
            place = place.setdefault(part, {}) if isinstance(place, dict) else place[part]
        if value is ABSENT:
            del place[last]
        elif isinstance(place, list) and last == len(place):
            place.append(value)
        else:
            place[last] = value
    return spec


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all values that hold no others."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from leaves(inner, (*path, index))
    else:
        yield path
