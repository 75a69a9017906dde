"""The run file's `cluster` section: the machines of the jobs, and how capacity is obtained.

Names and values follow Vertex AI's API. Its rules are those of the documentation of November 2026.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from vlmpipe.config.service_forms import REGION
from vlmpipe.trainer.config.base import Positive, Section
from vlmpipe.trainer.secret_detection import form_of_secret, is_secret_name

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
FLEX_START_MAX_TIMEOUT_S = 7 * 24 * 3600
# How long a step of ours watches a job on Vertex AI. The step is a custom job of the service's own, whose timeout of 7
# days (Scheduling.timeout, v1) cannot be set: neither the pipeline's format nor PipelineJob has a field for it. The
# rest is for its start, and for a job that is cancelled to save its checkpoint.
MAX_WATCHED_S = (7 * 24 - 2) * 3600


RESERVATION = "reservation"  # option of capacity_fallback that uses cluster.reservation_affinity
RESERVATION_NAME_KEY = "compute.googleapis.com/reservation-name"

Duration = Annotated[str, Field(pattern=r"^[0-9]{1,9}s$")]
Strategy = Literal["standard", "spot", "flex_start"]
StepWithDisk = Literal[
    "choose-replay", "plan-data", "prepare-chunks", "prepare-data", "sync-checkpoint", "register-model"
]
BootDisk = Literal["pd-ssd", "pd-standard", "hyperdisk-balanced"]


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

    replica_count: Literal["auto"] | Positive = Field(
        "auto",
        description="Number of reducers; auto is ceil(nodes * Gbit/s of a node / 32), which matches the nodes' "
        "bandwidth.",
    )
    machine_type: Literal["n1-highcpu-16", "n2-highcpu-16"] = Field(
        "n1-highcpu-16", description="Machine of a reducer, 32 Gbit/s each."
    )
    container_uri: str = Field(
        "us-docker.pkg.dev/vertex-ai-restricted/training/reductionserver:latest",
        min_length=1,
        description="Image of the reducers, published by Google for us, europe and asia.",
    )


class NfsMountConfig(Section):
    """An NFS share that is mounted in every container of every job."""

    server: str = Field(min_length=1, description="IP address of the server, inside the private network.")
    path: str = Field(min_length=1, description="Exported path, which begins with /.")
    mount_point: str = Field(min_length=1, description="Name of the folder: the share is at /mnt/nfs/<mount_point>.")


class LustreMountConfig(Section):
    """A Managed Lustre file system that is mounted in every container of every job."""

    instance_ip: str = Field(min_length=1, description="IP address of the instance, inside the private network.")
    volume_handle: str = Field(min_length=1, description="Identifier of the volume.")
    filesystem: str = Field(min_length=1, description="Name of the file system.")
    mount_point: str = Field(min_length=1, description="Name of the folder: it is at /mnt/lustre/<mount_point>.")


class ReservationAffinityConfig(Section):
    """Compute Engine reservations that the nodes may use."""

    reservation_affinity_type: Literal["specific_reservation", "any_reservation", "no_reservation"] = Field(
        description="Only the named reservations, any that fits and is shared automatically, or none."
    )
    key: str = Field(
        RESERVATION_NAME_KEY, min_length=1, description="Label key that values belong to. For specific_reservation."
    )
    values: tuple[str, ...] = Field(
        (),
        description="Full names, projects/PROJECT/zones/ZONE/reservations/NAME, of a zone in gcp.location. For "
        "specific_reservation.",
    )

    @model_validator(mode="after")
    def _names(self) -> ReservationAffinityConfig:
        if (self.reservation_affinity_type == "specific_reservation") != bool(self.values):
            raise ValueError(
                f"reservation_affinity_type {self.reservation_affinity_type} and {len(self.values)} values do not fit: "
                "specific_reservation takes at least one, the others none"
            )
        return self


class JobMachineConfig(Section):
    """Machine of one job, if it differs from the training machine."""

    processes_per_replica: Literal["auto"] | Positive = Field(
        "auto", description="Ranks on each node; auto is accelerator_count, or 1 without accelerators."
    )
    machine_type: str = Field(min_length=1, description="Compute Engine machine type of a node.")
    accelerator_type: Accelerator = Field("", description="GPU type; empty for CPU only.")
    accelerator_count: int = Field(0, ge=0, le=16, description="GPUs of one node.")
    boot_disk_type: BootDisk = Field("pd-ssd", description="Type of the boot disk.")
    boot_disk_size_gb: int = Field(100, ge=100, le=64000, description="Size of the boot disk, in GB; lost after a job.")
    reservation_affinity: ReservationAffinityConfig | None = Field(
        None, description="Reservations of these machines; null for none."
    )

    @model_validator(mode="after")
    def _accelerators(self) -> JobMachineConfig:
        _require_fitting_accelerators(self)
        return self


class CapacityOption(Section):
    """One way to get the training job's machines, tried for a while."""

    scheduling_strategy: Strategy = Field(description="How capacity is obtained; see cluster.scheduling_strategy.")
    reservation: bool = Field(
        False, description="Use cluster.reservation_affinity, which other options do not; needs standard."
    )
    location: Annotated[str, AfterValidator(REGION.required)] = Field(
        "",
        description="Region of the machines, such as us-east1; empty is gcp.location, where the run's bucket is.",
    )
    wait: Duration = Field(
        "3600s",
        description="Longest wait for machines before the next option, in seconds; 0s, for the last option only, "
        "waits without end.",
    )

    @property
    def name(self) -> str:
        """The scheduling strategy, or `reservation`; of another region with that: `spot@us-east1`."""
        kind = RESERVATION if self.reservation else self.scheduling_strategy
        return f"{kind}@{self.location}" if self.location else kind


def _named_option(value: object) -> object:
    if value == RESERVATION:
        return {"scheduling_strategy": "standard", "reservation": True}
    return {"scheduling_strategy": value} if isinstance(value, str) else value


CapacityOptionOrName = Annotated[
    CapacityOption,
    BeforeValidator(_named_option, json_schema_input_type=CapacityOption | Strategy | Literal["reservation"]),
]


class ClusterConfig(Section):
    """Machines of the jobs, and how Vertex AI obtains them."""

    replica_count: Positive = Field(1, description="Nodes: 1 chief and replica_count - 1 workers.")
    features_replica_count: Positive = Field(
        1, description="Nodes of the job that encodes images. Raise it to encode many images sooner."
    )
    features_machine: JobMachineConfig | None = Field(
        None, description="Machine of the job that encodes images; null takes the training machine."
    )
    evaluate_replica_count: Positive = Field(
        1, description="Nodes of the evaluation job. Raise it to answer many questions sooner."
    )
    evaluate_machine: JobMachineConfig | None = Field(
        None,
        description="Machine of the jobs evaluate, benchmark and audit, such as {machine_type: g2-standard-8, "
        "accelerator_type: NVIDIA_L4, accelerator_count: 1}; null takes the training machine. A model too large for "
        "one GPU is spread over the GPUs of a process: set processes_per_replica below accelerator_count.",
    )
    processes_per_replica: Literal["auto"] | Positive = Field(
        "auto", description="Ranks on each node; auto is accelerator_count, or 1 without accelerators."
    )
    machine_type: str = Field("n1-standard-8", min_length=1, description="Compute Engine machine type of a node.")
    accelerator_type: Accelerator = Field("", description="GPU type; empty for CPU only.")
    accelerator_count: int = Field(0, ge=0, le=16, description="GPUs of one node.")
    boot_disk_type: BootDisk = Field("pd-ssd", description="Type of the boot disk, which also holds local files.")
    boot_disk_size_gb: int = Field(100, ge=100, le=64000, description="Size of the boot disk, in GB; lost after a job.")
    step_disks: dict[StepWithDisk, Annotated[int, Field(ge=100, le=64000)]] = Field(
        default_factory=dict,
        description="Boot disks of the pipeline's own steps, in GB by step, such as {prepare-data: 500}; by default "
        "what the plan estimates. A step with more than 100 GB, the service's default, runs as a job of its own.",
    )
    image_uri: str = Field("", description="Trainer image, best by digest (...@sha256:...). Not used on this machine.")
    torch_build: str = Field(
        "cu130",
        pattern=r"^(cpu|cu[0-9]{3})?$",
        description="torch build in image_uri, against which GPUs are checked; the default is that of `make build`, "
        "empty checks none.",
    )
    scheduling_strategy: Strategy = Field(
        "standard",
        description="How capacity is obtained: on demand, preemptible, or queued (Dynamic Workload Scheduler).",
    )
    capacity_fallback: tuple[CapacityOptionOrName, ...] = Field(
        (),
        description="Strategies of the training job, each tried when the one before finds no machines in time, for "
        "example [reservation, spot, flex_start, {scheduling_strategy: standard, wait: 0s}]; empty takes "
        "scheduling_strategy. Vertex AI only.",
    )
    max_spend_usd: float | None = Field(
        None,
        gt=0,
        description="Spend at which training with capacity_fallback is stopped, in US dollars at the plan's prices; "
        "null for no limit.",
    )
    timeout: Duration = Field("604800s", description="Longest run time of a job, in seconds, for example 86400s.")
    max_wait_duration: Duration = Field(
        "86400s", description="Longest wait for capacity with flex_start, in seconds; 0s waits without end."
    )
    restart_job_on_worker_restart: bool = Field(
        False,
        description="Restart all nodes when one restarts. Needed with several nodes: ranks cannot rejoin a running "
        "job.",
    )
    disable_retries: bool = Field(
        False,
        description="Let a job fail at the first internal error of Vertex AI instead of retrying; also disables "
        "restart_job_on_worker_restart.",
    )
    reservation_affinity: ReservationAffinityConfig | None = Field(
        None,
        description="Reservations that the nodes may use; null for none. With capacity_fallback only its option "
        "reservation uses them.",
    )
    nfs_mounts: tuple[NfsMountConfig, ...] = Field(
        (),
        description="NFS shares in every container of every job, under /mnt/nfs. They need gcp.network or "
        "gcp.psc_interface_config.",
    )
    lustre_mounts: tuple[LustreMountConfig, ...] = Field(
        (),
        description="Managed Lustre file systems in every container of every job, under /mnt/lustre. They need "
        "gcp.network or gcp.psc_interface_config.",
    )
    reduction_server: ReductionServerConfig | None = Field(
        None,
        description="Pool of reducers for the training job; null for none. ddp then sums gradients in buckets of 64 "
        "MiB instead of 25.",
    )
    machine_check: Literal["fail", "warn"] = Field(
        "fail",
        description="Reaction of a job on Vertex AI or Kubeflow to a machine without the requested hardware, such as "
        "working GPUs: fail ends it in seconds with exit code 78, warn starts it with a warning.",
    )
    env: Environment = Field(
        default_factory=dict, description="Environment variables of every job container. No secrets."
    )

    @property
    def strategies(self) -> tuple[Strategy, ...]:
        """Scheduling strategies of all jobs, each once."""
        fallback = (option.scheduling_strategy for option in self.capacity_fallback)
        return tuple(dict.fromkeys((self.scheduling_strategy, *fallback)))

    def of_job(self, job: str) -> ClusterConfig:
        """The cluster with the nodes of one job, such as cache_features or evaluate, in place of training's."""
        cluster = {
            "replay": (self.evaluate_machine, self.evaluate_replica_count),
            "cache_features": (self.features_machine, self.features_replica_count),
            "evaluate": (self.evaluate_machine, self.evaluate_replica_count),
            "benchmark": (self.evaluate_machine, 1),
            "audit": (self.evaluate_machine, 1),
        }
        if job not in cluster:
            return self
        machine, replica_count = cluster[job]
        changes: dict[str, object] = {"replica_count": replica_count, "reduction_server": None}
        if machine:
            changes |= {name: getattr(machine, name) for name in JobMachineConfig.model_fields}
        return self.model_copy(update=changes)

    @property
    def processes(self) -> int:
        """Ranks on one node."""
        return _processes(self)

    @property
    def world_size(self) -> int:
        """Ranks of the training job."""
        return self.replica_count * self.processes

    @model_validator(mode="after")
    def _options(self) -> ClusterConfig:
        names = [option.name for option in self.capacity_fallback]
        if len(names) == 1 or len(set(names)) < len(names):
            raise ValueError(
                f"capacity_fallback {names} takes several different options; for a single one set scheduling_strategy"
            )
        self._require_use_of_reservations()
        if any(not duration_s(option.wait) for option in self.capacity_fallback[:-1]):
            raise ValueError(
                "capacity_fallback: only the last option may wait without end (0s), or no option after it is ever tried"
            )
        if self.max_spend_usd is not None and not self.capacity_fallback:
            raise ValueError(
                "max_spend_usd is watched by a capacity_fallback only: set capacity_fallback, or leave it out"
            )
        return self

    def _require_use_of_reservations(self) -> None:
        affinity, options = self.reservation_affinity, [rung for rung in self.capacity_fallback if rung.reservation]
        if any(option.location for option in options):
            raise ValueError("capacity_fallback: reservation takes no location: its zone is fixed")
        if any(option.scheduling_strategy != "standard" for option in options):
            raise ValueError(
                "capacity_fallback: reservation needs scheduling_strategy standard, as it is no Spot machine"
            )
        is_named = affinity is not None and affinity.reservation_affinity_type != "no_reservation"
        if options and not is_named:
            raise ValueError("capacity_fallback: reservation needs reservation_affinity, which says which one")
        if is_named and self.capacity_fallback and not options:
            raise ValueError("reservation_affinity is used by no option of capacity_fallback: add reservation to it")

    @model_validator(mode="after")
    def _accelerators(self) -> ClusterConfig:
        _require_fitting_accelerators(self)
        return self


def _processes(nodes: ClusterConfig | JobMachineConfig) -> int:
    if nodes.processes_per_replica == "auto":
        return max(1, nodes.accelerator_count)
    return nodes.processes_per_replica


def _require_fitting_accelerators(nodes: ClusterConfig | JobMachineConfig) -> None:
    if bool(nodes.accelerator_type) != bool(nodes.accelerator_count):
        raise ValueError(
            f"accelerator_type {nodes.accelerator_type or 'none'} and accelerator_count {nodes.accelerator_count} do "
            "not fit: give both or neither"
        )
    if nodes.accelerator_count and _processes(nodes) > nodes.accelerator_count:
        raise ValueError(
            f"processes_per_replica {_processes(nodes)} is more than accelerator_count {nodes.accelerator_count}: "
            "each rank needs its own GPU"
        )
