"""Machines, times and sizes of a pipeline's steps on Vertex AI: dated facts and assumptions of `steps.yaml`."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Literal

from pydantic.dataclasses import dataclass

from vlmpipe.catalog.machines import read_yaml

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
    sources = data["sources"]

    def sourced(entry: Mapping[str, Any]) -> dict[str, Any]:
        return {**entry, "source": sources[entry["source"]]["title"]}

    disk, start = sourced(data["disk"]), sourced(data["start"])
    return StepFacts(
        default_machine=data["default_machine"],
        limits={name: Limits(**entry) for name, entry in data["limits"].items()},
        boot_disk_type=disk["boot_disk_type"],
        boot_disk_size_gb=disk["boot_disk_size_gb"],
        system_gb=sourced(data["system_gb"])["value"],
        memory_share=sourced(data["memory_share"])["value"],
        images={name: Image(**sourced(entry)) for name, entry in data["images"].items()},
        cpu_machine_s=start["cpu_machine_s"],
        gpu_machine_s=start["gpu_machine_s"],
        pulled_gb_per_s=start["pulled_gb_per_s"],
        rates={name: sourced(entry)["value"] for name, entry in data["rates"].items()},
        steps={name: StepWork(**sourced(entry)) for name, entry in data["steps"].items()},
    )
