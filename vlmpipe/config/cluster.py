"""The run file's `cluster` section: the machines of the jobs, and how capacity is obtained.

Names and values follow Vertex AI's API. Its rules are those of the documentation of November 2026.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from trainer.config.base import Positive, Section
from trainer.secret_detection import form_of_secret, is_secret_name

Accelerator = Literal[
    "",
    "NVIDIA_TESLA_P4",
    "NVIDIA_TESLA_P100",
    "NVIDIA_TESLA_V100",
    "NVIDIA_TESLA_T4",
    "NVIDIA_TESLA_A100",
    "NVIDIA_A100_80GB",
    "NVIDIA_L4",
    "NVIDIA_H100_80GB",
    "NVIDIA_H100_MEGA_80GB",
    "NVIDIA_H200_141GB",
    "NVIDIA_B200",
    "NVIDIA_GB200",
    "NVIDIA_RTX_PRO_6000",
]
FLEX_START_MOST_TIMEOUT_S = 7 * 24 * 3600


Duration = Annotated[str, Field(pattern=r"^[0-9]{1,9}s$")]
Strategy = Literal["standard", "spot", "flex_start"]


def duration_s(text: str) -> int:
    """Seconds of a duration in the API's form, for example "3600s"."""
    return int(text.removesuffix("s"))


def _without_secrets(env: dict[str, str]) -> dict[str, str]:
    for name, value in env.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ValueError(f"{name!r} is not a name of an environment variable")
        if is_secret_name(name) or form_of_secret(value):
            # The value is not repeated here: errors end up in logs.
            raise ValueError(
                f"{name} looks like a secret, and everybody who may see the job can read its environment; keep it in "
                "Secret Manager and let the code that needs it read it there"
            )
    return env


Environment = Annotated[dict[str, str], AfterValidator(_without_secrets), Field(max_length=100)]


class ReductionServerConfig(Section):
    """Worker pool 2: CPU machines that sum gradients for the GPU nodes (NCCL all-reduce only)."""

    replica_count: Positive = Field(
        description="Reducers; ceil(nodes * Gbit/s of a node / 32) matches the nodes' bandwidth."
    )
    machine_type: Literal["n1-highcpu-16", "n2-highcpu-16"] = Field(
        "n1-highcpu-16", description="Machine of a reducer, 32 Gbit/s each."
    )
    container_uri: str = Field(
        "us-docker.pkg.dev/vertex-ai-restricted/training/reductionserver:latest",
        min_length=1,
        description="Image of the reducers, published by Google for us, europe and asia.",
    )


class CapacityOption(Section):
    """One way to get the training job's machines, tried for a while."""

    scheduling_strategy: Strategy = Field(description="How capacity is obtained; see cluster.scheduling_strategy.")
    wait: Duration = Field(
        "3600s",
        description="Longest wait for machines before the next option, in seconds; 0s, in the last, for no end.",
    )


CapacityOptionOrName = Annotated[
    CapacityOption,
    BeforeValidator(
        lambda value: {"scheduling_strategy": value} if isinstance(value, str) else value,
        json_schema_input_type=CapacityOption | Strategy,
    ),
]


class ClusterConfig(Section):
    """The machines of the training job, and how Vertex AI gets them."""

    replica_count: Positive = Field(1, description="Nodes: 1 chief and replica_count - 1 workers.")
    features_replica_count: Positive = Field(1, description="Nodes of the job that encodes images.")
    evaluate_replica_count: Positive = Field(1, description="Nodes of the evaluation job.")
    processes_per_replica: Literal["auto"] | Positive = Field(
        "auto", description="Ranks on each node; auto is accelerator_count, or 1 without accelerators."
    )
    machine_type: str = Field("n1-standard-8", min_length=1, description="Compute Engine machine type of a node.")
    accelerator_type: Accelerator = Field("", description="GPU type; empty for CPU only.")
    accelerator_count: int = Field(0, ge=0, le=16, description="GPUs of one node.")
    boot_disk_type: Literal["pd-ssd", "pd-standard", "hyperdisk-balanced"] = Field(
        "pd-ssd", description="Kind of the boot disk, which also holds local files."
    )
    boot_disk_size_gb: int = Field(100, ge=100, le=64000, description="Size of the boot disk, in GB; lost after a job.")
    image_uri: str = Field("", description="Trainer image, best by digest (...@sha256:...). Not used on this machine.")
    scheduling_strategy: Strategy = Field(
        "standard",
        description="How capacity is obtained: on demand, preemptible, or queued (Dynamic Workload Scheduler).",
    )
    capacity_fallback: tuple[CapacityOptionOrName, ...] = Field(
        (),
        description="Strategies of the training job, the next one tried when the one before finds no machines in time, "
        "for example [spot, flex_start, {scheduling_strategy: standard, wait: 0s}]; empty takes strategy. Vertex "
        "AI only.",
    )
    max_spend_usd: float | None = Field(
        None,
        gt=0,
        description="Of capacity fallback: US dollars, at the plan's prices, at which training is stopped; null "
        "for no limit.",
    )
    timeout: Duration = Field("604800s", description="Longest time a job may run, in seconds, for example 86400s.")
    max_wait_duration: Duration = Field(
        "86400s", description="Longest wait for capacity with flex_start, in seconds; 0s waits without end."
    )
    restart_job_on_worker_restart: bool = Field(
        False,
        description="Restart all nodes when one restarts; needed with several: ranks cannot rejoin a running job.",
    )
    reduction_server: ReductionServerConfig | None = Field(
        None,
        description="Pool of reducers for the training job; null for none. ddp then sums gradients in buckets of 64 "
        "MiB, which Google recommends, instead of torch's 25.",
    )
    local_port: int = Field(
        0, ge=0, le=65535, description="Port at which local replicas meet; 0 takes a free one. Local runs only."
    )
    env: Environment = Field(default_factory=dict, description="Environment of every job container. No secrets.")

    @property
    def strategies(self) -> tuple[Strategy, ...]:
        """Scheduling strategies of all jobs, each once."""
        fallback = (option.scheduling_strategy for option in self.capacity_fallback)
        return tuple(dict.fromkeys((self.scheduling_strategy, *fallback)))

    @property
    def processes(self) -> int:
        """Ranks on one node."""
        if self.processes_per_replica == "auto":
            return max(1, self.accelerator_count)
        return self.processes_per_replica

    @property
    def world_size(self) -> int:
        """Ranks of the training job."""
        return self.replica_count * self.processes

    @model_validator(mode="after")
    def _options(self) -> ClusterConfig:
        names = [option.scheduling_strategy for option in self.capacity_fallback]
        if len(names) == 1 or len(set(names)) < len(names):
            raise ValueError(
                f"capacity_fallback {names} takes two or three different strategies; for a single one set strategy"
            )
        if any(not duration_s(option.wait) for option in self.capacity_fallback[:-1]):
            raise ValueError(
                "capacity_fallback: only the last option may wait without end (0s), or none behind it is ever tried"
            )
        if self.max_spend_usd is not None and not self.capacity_fallback:
            raise ValueError(
                "max_spend_usd is watched by a capacity_fallback only: set capacity_fallback, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _accelerators(self) -> ClusterConfig:
        if bool(self.accelerator_type) != bool(self.accelerator_count):
            raise ValueError(
                f"accelerator_type {self.accelerator_type or 'none'} and accelerator_count {self.accelerator_count} do "
                "not fit: give both or neither"
            )
        if self.accelerator_count and self.processes > self.accelerator_count:
            raise ValueError(
                f"processes_per_replica {self.processes} is more than accelerator_count {self.accelerator_count}: "
                "each rank needs its own GPU"
            )
        return self
