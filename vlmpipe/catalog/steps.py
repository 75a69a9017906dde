"""Machines, times and sizes of a pipeline's steps on Vertex AI: dated facts and assumptions of `steps.yaml`."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Literal

from pydantic import TypeAdapter
from pydantic.dataclasses import dataclass

from vlmpipe.catalog.machines import entries_at, read_yaml, source_at
from vlmpipe.trainer.nesting import object_at

ImageName = Literal["pipeline", "trainer", "launcher"]


@dataclass(frozen=True)
class Limits:
    """CPU and memory that a compiled step asks for, and the machine that it is taken to get."""

    cpus: str
    memory: str
    machine: str


@dataclass(frozen=True)
class Image:
    """Size of a container image, in GB."""

    pulled_gb: float  # compressed
    disk_gb: float
    source: str


@dataclass(frozen=True)
class StepWork:
    """Work of a step that does not grow with data or model: seconds, and memory in GB."""

    work_s: float
    memory_gb: float
    source: str


@dataclass(frozen=True)
class StepFacts:
    """The contents of steps.yaml."""

    default_machine: str
    limits: Mapping[str, Limits]
    boot_disk_type: str
    boot_disk_size_gb: int
    system_gb: float
    memory_share: float
    images: Mapping[ImageName, Image]
    cpu_machine_s: float
    gpu_machine_s: float
    pulled_gb_per_s: float
    rates: Mapping[str, float]
    steps: Mapping[str, StepWork]

    def machine_of(self, step: str) -> str:
        """Machine type that a step without a disk of its own is taken to get."""
        return self.limits[step].machine if step in self.limits else self.default_machine

    def free_gb(self, disk_gb: int, image: ImageName) -> float:
        """Free bytes of a boot disk beside the system and the image."""
        return disk_gb - self.system_gb - self.images[image].disk_gb

    def start_s(self, image: ImageName, *, has_gpus: bool = False) -> float:
        """From the request of a machine to the first line of its container."""
        machine_s = self.gpu_machine_s if has_gpus else self.cpu_machine_s
        return machine_s + self.images[image].pulled_gb / self.pulled_gb_per_s


@functools.cache
def load_steps() -> StepFacts:
    """The facts of `steps.yaml`. KeyError for a source that it does not name."""
    data = read_yaml("steps.yaml")

    def sourced(entry: Mapping[str, object]) -> dict[str, object]:
        return {**entry, "source": source_at(data, entry["source"])["title"]}

    disk, start = sourced(object_at(data, "disk")), sourced(object_at(data, "start"))
    content = {
        "default_machine": data["default_machine"],
        "limits": data["limits"],
        "boot_disk_type": disk["boot_disk_type"],
        "boot_disk_size_gb": disk["boot_disk_size_gb"],
        "system_gb": sourced(object_at(data, "system_gb"))["value"],
        "memory_share": sourced(object_at(data, "memory_share"))["value"],
        "images": {name: sourced(entry) for name, entry in entries_at(data, "images").items()},
        "cpu_machine_s": start["cpu_machine_s"],
        "gpu_machine_s": start["gpu_machine_s"],
        "pulled_gb_per_s": start["pulled_gb_per_s"],
        "rates": {name: sourced(entry)["value"] for name, entry in entries_at(data, "rates").items()},
        "steps": {name: sourced(entry) for name, entry in entries_at(data, "steps").items()},
    }
    return TypeAdapter(StepFacts).validate_python(content)
