"""The run file's sections that only the pipeline reads: output, cluster, register, schedule and gcp.

Names and values stay close to Vertex AI's API, so that a field can be looked up in its documentation. Platform rules
that this file states come from the Vertex AI documentation and were read in November 2026.
"""

from __future__ import annotations

import re
import zoneinfo
from datetime import datetime
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
Duration = Annotated[str, Field(pattern=r"^[0-9]{1,9}s$")]
FLEX_START_MOST_TIMEOUT_S = 7 * 24 * 3600

_MODEL_ID = re.compile(r"vertex://[a-z0-9_][a-z0-9_-]{0,62}")
_ENV_NAME = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")


def duration_s(text: str) -> int:
    """Seconds of a duration in the API's form, for example "3600s"."""
    return int(text.removesuffix("s"))


def _env(env: dict[str, str]) -> dict[str, str]:
    for name, value in env.items():
        if not _ENV_NAME.match(name):
            raise ValueError(f"{name!r} is not a name of an environment variable")
        if is_secret_name(name) or form_of_secret(value):
            # The value is not repeated here: errors end up in logs.
            raise ValueError(
                f"{name} looks like a secret, and everybody who may see the job can read its environment; keep it in "
                "Secret Manager and let the code that needs it read it there"
            )
    return env


def _timezone(name: str) -> str:
    if name not in zoneinfo.available_timezones():
        raise ValueError("not a known time zone, give one such as UTC or Europe/Paris")
    return name


def _cron(text: str) -> str:
    if "TZ=" in text:
        raise ValueError("leave TZ= out and set schedule.timezone")
    if len(text.split()) != 5:
        raise ValueError("a cron line has five fields (minute hour day month weekday), for example 0 3 * * 1")
    return text


def _registry(place: str) -> str:
    if place.startswith("vertex:") and not _MODEL_ID.fullmatch(place):
        raise ValueError("vertex://MODEL_ID takes lower-case letters, digits, _ and -, 63 at most")
    return place


class OutputConfig(Section):
    """Where everything is written."""

    root_uri: str = Field(
        "runs",
        min_length=1,
        description="Folder or gs:// prefix for runs, prepared data, features and the registry. A local folder is used "
        "on this machine; elsewhere gcp.pipeline_root then takes its place.",
    )


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


Strategy = Literal["standard", "spot", "flex_start"]


class Rung(Section):
    """One way to get the training job's machines, tried for a while."""

    strategy: Strategy = Field(description="How capacity is obtained; see cluster.strategy.")
    wait: Duration = Field(
        "3600s", description="Longest wait for machines before the next rung, in seconds; 0s, in the last, for no end."
    )


def _rung(value: object) -> object:
    return {"strategy": value} if isinstance(value, str) else value


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
    strategy: Strategy = Field(
        "standard",
        description="How capacity is obtained: on demand, preemptible, or queued (Dynamic Workload Scheduler).",
    )
    ladder: tuple[Annotated[Rung, BeforeValidator(_rung, json_schema_input_type=Rung | Strategy)], ...] = Field(
        (),
        description="Strategies of the training job, the next one tried when the one before finds no machines in time, "
        "for example [spot, flex_start, {strategy: standard, wait: 0s}]; empty takes strategy. Vertex AI only.",
    )
    max_spend_usd: float | None = Field(
        None,
        gt=0,
        description="Of a ladder: US dollars, at the plan's prices, at which training is stopped; null for no limit.",
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
    env: Annotated[dict[str, str], AfterValidator(_env)] = Field(
        default_factory=dict, max_length=100, description="Environment of every job container. No secrets."
    )

    @property
    def strategies(self) -> tuple[Strategy, ...]:
        """Every way in which some job may get its machines."""
        return tuple(dict.fromkeys((self.strategy, *(rung.strategy for rung in self.ladder))))

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
    def _rungs(self) -> ClusterConfig:
        names = [rung.strategy for rung in self.ladder]
        if len(names) == 1 or len(set(names)) < len(names):
            raise ValueError(f"ladder {names} takes two or three different strategies; for a single one set strategy")
        if any(not duration_s(rung.wait) for rung in self.ladder[:-1]):
            raise ValueError("ladder: only the last rung may wait without end (0s), or none behind it is ever tried")
        if self.max_spend_usd is not None and not self.ladder:
            raise ValueError("max_spend_usd is watched by a ladder only: set ladder, or leave it out")
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


class ServingConfig(Section):
    """The container in which Vertex AI serves a registered model, once somebody deploys it."""

    image_uri: str = Field(
        pattern=r"^([a-z0-9-]+-docker\.pkg\.dev|([a-z]+\.)?gcr\.io)/[a-z0-9._/-]+(@sha256:[0-9a-f]{64}|:[A-Za-z0-9._-]+)$",
        description="Serving image in Artifact Registry; it finds the model at AIP_STORAGE_URI.",
    )
    command: tuple[str, ...] = Field((), description="Command instead of the image's own.")
    args: tuple[str, ...] = Field(
        (), description="Arguments; {model_uri} in one of them becomes the registered folder's gs:// URI."
    )
    port: int = Field(8080, ge=1, le=65535, description="Port at which the container answers.")
    predict_route: str = Field("", pattern=r"^(/.*)?$", description="HTTP path of predictions; empty for Vertex AI's.")
    health_route: str = Field("", pattern=r"^(/.*)?$", description="HTTP path of health checks; empty for Vertex AI's.")
    env: Annotated[dict[str, str], AfterValidator(_env)] = Field(
        default_factory=dict, max_length=100, description="Environment of the container. No secrets."
    )


class RegisterConfig(Section):
    """How an accepted model is registered."""

    registry: Annotated[str, AfterValidator(_registry)] = Field(
        "",
        description="Where versions are kept: a folder, a gs:// prefix, or vertex://MODEL_ID for a model of Vertex AI "
        "Model Registry; empty takes registry/ under output.root_uri.",
    )
    serving: ServingConfig | None = Field(
        None, description="Serving container of the registered model; needed, and used, with vertex:// only."
    )
    model_name: str = Field(
        "",
        pattern=r"^([A-Za-z0-9][A-Za-z0-9_.-]{0,127})?$",
        description="Name in the registry; empty takes the run's name.",
    )
    alias: str = Field(
        "champion", pattern=r"^[a-z][a-z0-9-]{0,126}[a-z0-9]$", description="Alias that moves to the accepted version."
    )


class ScheduleConfig(Section):
    """Recurring runs on Vertex AI."""

    cron: Annotated[str, AfterValidator(_cron)] = Field(description="When to start, five cron fields.")
    timezone: Annotated[str, AfterValidator(_timezone)] = Field("UTC", description="Time zone of cron.")
    start_time: datetime | None = Field(None, description="First moment at which runs may start (RFC 3339).")
    end_time: datetime | None = Field(None, description="Moment after which no run starts (RFC 3339).")
    max_run_count: Positive | None = Field(None, description="Runs after which the schedule ends; null for no end.")
    max_concurrent_active_run_count: Positive = Field(
        1, description="Runs of this schedule that may be active at once; 1 keeps retrainings from overlapping."
    )
    allow_queueing: bool = Field(False, description="Queue a run that is due while too many are active, or skip it.")


class PlanConfig(Section):
    """What the plan assumes where nothing is known yet, and what may be spent without asking. Changes no result."""

    samples: int = Field(
        0, ge=0, description="Training samples, for data that is not prepared yet; 0 leaves hours and cost open."
    )
    sample_tokens: int = Field(
        0, ge=0, description="Mean tokens of a sample, image tokens included, for data that is not prepared yet."
    )
    sample_images: float = Field(1.0, ge=0, description="Mean images of a sample, for data that is not prepared yet.")
    confirm_above_usd: float = Field(
        100.0,
        ge=0,
        description="vlmpipe submit asks before it starts a run that is planned to cost more, in US dollars.",
    )
    refuse_red: bool = Field(
        True, description="End a run on Vertex AI in its first step when the plan says that it would fail."
    )
    prices_file: str = Field(
        "",
        description="Prices of your own contract, in the form of the built-in prices.yaml, whose entries they replace.",
    )
    preemptions_per_node_hour: float = Field(
        0.02, ge=0, le=60, description="Assumed rate at which a Spot node is taken away; no platform states one."
    )
    restart_s: float = Field(
        600.0, ge=0, description="Assumed time from a preemption to the first step after it, in seconds."
    )
    checkpoint_save_s: float = Field(
        0.0, ge=0, description="Measured time that a checkpoint holds training up, in seconds; 0 estimates it."
    )
    disk_gbytes_per_s: float = Field(
        1.0, gt=0, description="Assumed rate of the disk under train.nvme_path, read and written, in GB/s a machine."
    )
    efficiency: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Measured share of the GPU's peak that computing reaches; 0 takes the planner's assumption.",
    )


class PscInterfaceConfig(Section):
    """Private Service Connect interface of the jobs."""

    network_attachment: str = Field(min_length=1, description="Network attachment, by name or full resource name.")


class GcpConfig(Section):
    """The Google Cloud project in which the pipeline runs. On Kubeflow only pipeline_image and pipeline_root count."""

    project: str = Field("", description="Project id.")
    location: str = Field("us-central1", pattern=r"^[a-z]+-[a-z]+[0-9]+$", description="Region of pipeline and jobs.")
    pipeline_image: str = Field("", description="Image of the pipeline's CPU steps, best by digest.")
    service_account: str = Field("", description="E-mail of the service account that the pipeline's steps run as.")
    job_service_account: str = Field(
        "",
        pattern=r"^([a-z0-9-]+@[a-z0-9.:-]+\.gserviceaccount\.com)?$",
        description="E-mail of the service account that the jobs run as, which needs to start nothing; empty takes "
        "service_account.",
    )
    pipeline_root: str = Field("", description="gs:// prefix for the pipeline's own artifacts.")
    network: str = Field("", description="VPC network to peer with: projects/<number>/global/networks/<name>.")
    psc_interface_config: PscInterfaceConfig | None = Field(
        None, description="Private Service Connect interface, instead of network."
    )
    labels: dict[str, str] = Field(
        default_factory=dict, max_length=63, description="Labels of pipeline and jobs; vlmpipe adds one of its own."
    )
    tensorboard: str = Field("", description="Vertex AI TensorBoard instance, full resource name.")
    experiment: str = Field(
        "",
        pattern=r"^([a-z0-9][a-z0-9-]{3,59})?$",
        description="Vertex AI experiment in which each run logs its settings and final metrics; empty for none.",
    )
    encryption_spec_key_name: str = Field("", description="Customer-managed encryption key, full resource name.")
    persistent_resource_id: str = Field("", description="Persistent resource to run the jobs on.")
    enable_web_access: bool = Field(False, description="Allow an interactive shell into running jobs.")

    @model_validator(mode="after")
    def _one_network(self) -> GcpConfig:
        if self.network and self.psc_interface_config:
            raise ValueError("give network or psc_interface_config, not both: a job has one of them")
        return self
