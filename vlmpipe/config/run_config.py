"""RunConfig: the schema of the run file.

The sections that a job needs are in `trainer.config`, the others in this room. Here they meet, with the checks that
concern several of them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, ValidationError, model_validator

from trainer.config.base import Section
from trainer.config.checkpoint import CheckpointConfig
from trainer.config.data import DataConfig
from trainer.config.job import EvaluateConfig, FeaturesConfig, RunPaths, run_uri_of
from trainer.config.model import GRID_FAMILIES, MOST_ASPECT, ModelConfig
from trainer.config.train import QUANTIZING, TrainConfig
from trainer.errors import ConfigError
from trainer.secret_detection import known_form
from trainer.sizing.deepspeed_config import uses_hpz
from vlmpipe.config.cluster import FLEX_START_MOST_TIMEOUT_S, ClusterConfig
from vlmpipe.config.fields import duration_s
from vlmpipe.config.gate import GateConfig
from vlmpipe.config.gcp import GcpConfig
from vlmpipe.config.kubeflow import KubeflowConfig
from vlmpipe.config.notify import NotifyConfig
from vlmpipe.config.output import OutputConfig, RegisterConfig
from vlmpipe.config.plan import PlanConfig
from vlmpipe.config.schedule import ScheduleConfig
from vlmpipe.config.tune import TuneConfig
from vlmpipe.config.validation_errors import (
    Problem,
    ProblemsError,
    RunFileError,
    closest_field,
    from_validation_error,
    show,
)
from vlmpipe.config.yaml_loader import apply_overrides, parse_overrides, read_run_file

BUILTIN_SOURCES = ("builtin:digits", "builtin:easy-vqa", "builtin:openmoji")
ALL_REDUCE_STRATEGIES = ("ddp", "zero1", "zero2", "hsdp")

_IMAGE = re.compile(r"^[a-z0-9.-]+\.[a-z]{2,}(:[0-9]+)?/[a-z0-9._/-]+(@sha256:[0-9a-f]{64}|:[A-Za-z0-9._-]{1,128})$")
_SERVICE_ACCOUNT = re.compile(r"^[a-z0-9-]+@[a-z0-9.:-]+\.gserviceaccount\.com$")
_PROJECT = re.compile(r"^([a-z0-9.-]+:)?[a-z][a-z0-9-]{4,28}[a-z0-9]$")


RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def _known_source(data: DataConfig) -> DataConfig:
    if data.source.startswith("builtin:") and data.source not in BUILTIN_SOURCES:
        closest = closest_field(data.source, BUILTIN_SOURCES)
        hint = f"; did you mean {closest}?" if closest else ""
        text = f"found {show(data.source)}, expected one of {', '.join(BUILTIN_SOURCES)}{hint}"
        raise ProblemsError([Problem("data.source", text)])
    return data


class RunConfig(Section):
    """A run: which model, on which data, trained how, on which machines, and what must be reached to register it."""

    model_config = ConfigDict(populate_by_name=True)

    version: Literal[1] = Field(1, description="Version of this file's format.")
    name: str = Field(
        pattern=r"^[a-z][a-z0-9-]{2,61}[a-z0-9]$",
        description="Name of the run file's runs: lower case, digits, dashes.",
    )
    model: ModelConfig = Field(description="The vision-language model.")
    data: Annotated[DataConfig, AfterValidator(_known_source)] = Field(description="Where samples come from.")
    features: FeaturesConfig = Field(default_factory=FeaturesConfig, description="Caching of the tower's output.")
    train: TrainConfig = Field(description="The training step.")
    checkpoint: CheckpointConfig = Field(
        default_factory=CheckpointConfig, description="How checkpoints are written and kept."
    )
    evaluate: EvaluateConfig = Field(default_factory=EvaluateConfig, description="Evaluation on held-out samples.")
    output: OutputConfig = Field(default_factory=OutputConfig, description="Where everything is written.")
    cluster: ClusterConfig = Field(default_factory=ClusterConfig, description="The machines of the jobs.")
    gate: GateConfig = Field(default_factory=GateConfig, description="What a model must reach to be registered.")
    # `register` would hide a method that pydantic's models have from abc.ABCMeta.
    register_: RegisterConfig = Field(
        default_factory=RegisterConfig, alias="register", description="How an accepted model is registered."
    )
    schedule: ScheduleConfig | None = Field(None, description="Recurring runs on Vertex AI; null for none.")
    tune: TuneConfig | None = Field(None, description="A search over fields of train; null for none.")
    notify: NotifyConfig = Field(default_factory=NotifyConfig, description="Who hears how a run ended.")
    plan: PlanConfig = Field(
        default_factory=PlanConfig, description="What vlmpipe plan assumes, and what needs asking."
    )
    gcp: GcpConfig = Field(default_factory=GcpConfig, description="The Google Cloud project. Vertex AI only.")
    kubeflow: KubeflowConfig = Field(
        default_factory=KubeflowConfig, description="The Kubernetes cluster of --target kubeflow."
    )

    @model_validator(mode="after")
    def _sections_fit(self) -> RunConfig:
        if problems := [*_secrets(self.to_dict()), *_cross_section_problems(self)]:
            raise ProblemsError(problems)
        return self

    @cached_property
    def source(self) -> tuple[str, ...]:
        """What names this run file on the command line: path and overrides, set by `load_run_file`; else its name."""
        return (self.name,)

    @property
    def model_name(self) -> str:
        """Name in the registry."""
        return self.register_.model_name or self.name

    def root_uri(self, target: Literal["local", "vertex", "kubeflow"]) -> str:
        """Where runs, prepared data, features and the registry lie. Only on this machine can a local folder be used."""
        if target != "local" and not self.output.root_uri.startswith("gs://"):
            return self.gcp.pipeline_root
        return self.output.root_uri

    def to_dict(self) -> dict[str, Any]:
        """The run file with all defaults, in JSON's types."""
        return self.model_dump(mode="json", by_alias=True)

    def to_run_json(self, run: RunPaths) -> dict[str, Any]:
        """The effective run file of one run, as `resolve_run` writes it and `JobConfig.load` reads it."""
        sections = self.to_dict()
        return {"version": sections.pop("version"), "name": sections.pop("name"), "run": run.model_dump(), **sections}

    def digest(self) -> str:
        """sha256 (hex) of everything in the run file; equal for files that differ in form only."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()

    def require_vertex(self) -> None:
        """Raise RunFileError unless everything that only Vertex AI needs is there. For compiling.

        The data may still be named when a run is started; see `require_data_in_cloud`.
        """
        if problems := [*_vertex_problems(self), *_vertex_registry_problems(self)]:
            raise RunFileError(f"run file {self.name}, for Vertex AI", problems)

    def require_data_in_cloud(self, place: str = "Vertex AI") -> None:
        """Raise RunFileError unless the data can be read from `place`. For starting a run."""
        if problems := list(_cloud_data_problems(self.data)):
            raise RunFileError(f"run file {self.name}, for {place}", problems)


def load_run_file(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read and check a run file with `a.b=c` overrides applied. Raises ConfigError that lists every problem."""
    data = apply_overrides(read_run_file(Path(path)), parse_overrides(overrides))
    config = parse_run_config(data, str(path))
    config.__dict__["source"] = (str(path), *overrides)  # as cached_property keeps it: no part of equality
    return config


def parse_run_config(data: Mapping[str, Any], source: str) -> RunConfig:
    """Check a run file's content. `source` names it in the error, a RunFileError that lists every problem."""
    try:
        return RunConfig.model_validate(dict(data))
    except ValidationError as error:
        raise RunFileError(source, from_validation_error(error, RunConfig)) from None


def warnings(config: RunConfig) -> list[Problem]:
    """Settings that are allowed but have no effect, or are most likely not meant."""
    found = []
    cluster, data = config.cluster, config.data
    if data.image_folder and (data.source.startswith("builtin:") or data.source.endswith(".tar")):
        found.append(Problem("data.image_folder", f"has no effect: {data.source} brings its own pictures"))
    if cluster.capacity_fallback and "scheduling_strategy" not in cluster.model_fields_set:
        text = (
            "is left at standard, which features and evaluation take: cluster.capacity_fallback is the training job's"
        )
        found.append(Problem("cluster.scheduling_strategy", text))
    if "max_wait_duration" in cluster.model_fields_set and cluster.scheduling_strategy != "flex_start":
        found.append(
            Problem("cluster.max_wait_duration", "has no effect: only cluster.scheduling_strategy flex_start waits")
        )
    if "decay_fraction" in config.train.model_fields_set and config.train.lr_schedule != "wsd":
        found.append(
            Problem("train.decay_fraction", "has no effect: only train.lr_schedule wsd has a decay of its own")
        )
    if config.train.zero_hpz and not uses_hpz(nodes=cluster.replica_count, node_ranks=cluster.processes):
        why = "one node has all weights anyhow"
        if cluster.replica_count > 1:
            why = "with one process a node its copy would be whole, which is strategy zero2"
        found.append(Problem("train.zero_hpz", f"has no effect: {why}"))
    if cluster.replica_count > 1 and not cluster.restart_job_on_worker_restart:
        found.append(
            Problem(
                "cluster.restart_job_on_worker_restart",
                "is false with several nodes: one that Vertex AI restarts cannot rejoin the others, and the job hangs",
            )
        )
    if config.register_.serving and not config.register_.registry.startswith("vertex://"):
        found.append(Problem("register.serving", "has no effect: only register.registry vertex://MODEL_ID serves"))
    if not config.gate.checks_something:
        found.append(Problem("gate", "sets no bound: every model is accepted and registered"))
    for path, image in (("cluster.image_uri", cluster.image_uri), ("gcp.pipeline_image", config.gcp.pipeline_image)):
        if image and "@sha256:" not in image:
            found.append(Problem(path, "names an image by tag, which may change; a digest (@sha256:...) does not"))
    return found


def _secrets(value: Any, path: str = "") -> Iterator[Problem]:
    """Fields that hold a secret of a well-known form, wherever they are. The value is not repeated."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _secrets(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _secrets(inner, f"{path}.{index}")
    elif isinstance(value, str) and (form := known_form(value)):
        text = f"holds a secret ({form}), and everybody who may see the pipeline can read it; keep it in Secret Manager"
        yield Problem(path, text)


def _cross_section_problems(config: RunConfig) -> Iterator[Problem]:
    model, train, cluster = config.model, config.train, config.cluster
    if config.features.cache == "on" and "tower" not in model.freeze:
        yield Problem(
            "features.cache",
            "found on, but the tower is trained, so its output changes; expected tower in model.freeze, or off",
        )
    if train.overlap_vision_encoder and ("tower" not in model.freeze or config.features.cache == "on"):
        state = "is trained" if "tower" not in model.freeze else "does not run: features.cache is on"
        yield Problem(
            "train.overlap_vision_encoder",
            f"found true, but the tower {state}; expected tower in model.freeze and cache off",
        )
    if model.quantizes_base and train.strategy not in QUANTIZING:
        yield Problem(
            "model.lora.quantize_base",
            f"found nf4 with train.strategy {train.strategy}, which cannot shard 4-bit weights; expected one of "
            f"{', '.join(QUANTIZING)}, such as train.strategy ddp: every rank holds the small base whole",
        )
    if model.quantizes_base and train.compile:
        yield Problem(
            "train.compile",
            "found true with model.lora.quantize_base, whose kernels torch.compile cannot trace; expected false",
        )
    if model.family in GRID_FAMILIES:
        yield from _grid_family_problems(config)
    if train.model_ranks > 1:
        yield from _parallel_problems(config)
    copies = max(1, cluster.world_size // train.model_ranks)
    step_sequences = copies * train.micro_batch_size
    if train.global_batch_size % step_sequences:
        each = f", {train.model_ranks} for each copy of the model" if train.model_ranks > 1 else ""
        yield Problem(
            "train.global_batch_size",
            f"found {train.global_batch_size}, expected a multiple of {step_sequences} = {copies} "
            f"{'copies' if each else 'ranks'} (cluster.replica_count {cluster.replica_count} x {cluster.processes} "
            f"processes{each}) x train.micro_batch_size {train.micro_batch_size}",
        )
    if not 0 < config.data.validation_fraction < 1:
        yield Problem(
            "data.validation_fraction",
            f"found {config.data.validation_fraction:g}, expected more than 0 and less than 1: a run trains on one "
            "part of its samples and is evaluated on the other",
        )
    yield from _cluster_problems(config)
    if "cider_d" in config.gate.min_scores and config.evaluate.cider_d == "off":
        yield Problem(
            "gate.min_scores.cider_d", "found with evaluate.cider_d off, which gives none; expected auto or on"
        )
    if config.register_.registry.startswith("vertex://"):
        yield from _model_registry_problems(config)


def _model_registry_problems(config: RunConfig) -> Iterator[Problem]:
    named = f"found register.registry {config.register_.registry}"
    if config.register_.serving is None:
        yield Problem(
            "register.serving", f"missing, {named}; expected image_uri of a serving container, which Vertex AI asks for"
        )
    if not config.gcp.project:
        yield Problem("gcp.project", f"missing, {named}; expected the project that holds the model")


def _grid_family_problems(config: RunConfig) -> Iterator[Problem]:
    model, data = config.model, config.data
    if data.max_image_aspect > MOST_ASPECT:
        yield Problem(
            "data.max_image_aspect",
            f"found {data.max_image_aspect:g} with model.family {model.family}, whose images keep their shape; "
            f"expected at most {MOST_ASPECT:g}",
        )


def _parallel_problems(config: RunConfig) -> Iterator[Problem]:
    train, cluster = config.train, config.cluster
    if cluster.processes % train.tensor_parallel:
        yield Problem(
            "train.tensor_parallel",
            f"found {train.tensor_parallel}, expected a divisor of the {cluster.processes} processes of a node: layers "
            "are split inside a node",
        )
    if train.sequence_parallel and config.data.sequence_length % train.tensor_parallel:
        yield Problem(
            "train.sequence_parallel",
            f"found with data.sequence_length {config.data.sequence_length}, expected a multiple of "
            "train.tensor_parallel "
            f"{train.tensor_parallel}: so many ranks share the tokens of a sequence",
        )
    if cluster.world_size % train.model_ranks:
        yield Problem(
            "train.pipeline_parallel",
            f"found {train.pipeline_parallel} with train.tensor_parallel {train.tensor_parallel}, expected ranks "
            f"({cluster.world_size}) that are a multiple of {train.model_ranks}",
        )


def _cluster_problems(config: RunConfig) -> Iterator[Problem]:
    train, cluster = config.train, config.cluster
    if not cluster.accelerator_count:
        for name in train.quantized:
            yield Problem(f"train.{name}", "found without GPUs, expected GPU nodes (its kernels are CUDA's), or false")
    flex_start = "cluster.scheduling_strategy" if cluster.scheduling_strategy == "flex_start" else ""
    if any(option.scheduling_strategy == "flex_start" for option in cluster.capacity_fallback):
        flex_start = "cluster.capacity_fallback"
    if cluster.capacity_fallback and train.resume == "never":
        yield Problem(
            "train.resume", "found never with cluster.capacity_fallback, whose next option continues; expected auto"
        )
    if cluster.capacity_fallback and config.gcp.persistent_resource_id:
        yield Problem(
            "cluster.capacity_fallback", "found with gcp.persistent_resource_id, whose machines are there already"
        )
    if cluster.reduction_server:
        if cluster.replica_count < 2:
            yield Problem(
                "cluster.reduction_server", "found with 1 node, expected cluster.replica_count of at least 2, or null"
            )
        if train.strategy not in ALL_REDUCE_STRATEGIES:
            yield Problem(
                "cluster.reduction_server",
                f"found with train.strategy {train.strategy}, which sums no gradients by all-reduce, so reducers would "
                f"idle; expected one of {', '.join(ALL_REDUCE_STRATEGIES)}, or null",
            )
        if not cluster.accelerator_count:
            yield Problem("cluster.reduction_server", "found without GPUs, expected GPU nodes (it works through NCCL)")
        if flex_start:
            yield Problem(
                "cluster.reduction_server",
                f"found with {flex_start} flex_start, which needs equal machines in all pools; expected null",
            )
    if flex_start:
        if not cluster.accelerator_count:
            yield Problem(flex_start, "found flex_start without GPUs, expected accelerator_type and _count")
        if duration_s(cluster.timeout) > FLEX_START_MOST_TIMEOUT_S:
            yield Problem(
                "cluster.timeout",
                f"found {cluster.timeout}, expected at most {FLEX_START_MOST_TIMEOUT_S}s with flex_start",
            )


def _vertex_problems(config: RunConfig) -> Iterator[Problem]:
    gcp = config.gcp
    checks = (
        ("gcp.project", gcp.project, _PROJECT, "a project id such as my-project"),
        (
            "gcp.service_account",
            gcp.service_account,
            _SERVICE_ACCOUNT,
            "a service account such as trainer@my-project.iam.gserviceaccount.com",
        ),
        ("gcp.pipeline_image", gcp.pipeline_image, _IMAGE, "an image such as <location>-docker.pkg.dev/...@sha256:..."),
        (
            "cluster.image_uri",
            config.cluster.image_uri,
            _IMAGE,
            "an image such as <location>-docker.pkg.dev/...@sha256:...",
        ),
        ("gcp.pipeline_root", gcp.pipeline_root, re.compile(r"^gs://[a-z0-9][a-z0-9._-]+"), "gs://bucket/folder"),
    )
    for path, value, form, expected in checks:
        if not form.match(value):
            yield Problem(
                path, f"found {show(value)}, expected {expected}" if value else f"missing, expected {expected}"
            )


def _vertex_registry_problems(config: RunConfig) -> Iterator[Problem]:
    registry = config.register_.registry
    if registry and not registry.startswith(("gs://", "vertex://")):
        yield Problem(
            "register.registry",
            f"found {show(registry)}, expected gs:// or vertex://MODEL_ID: no step sees a folder here",
        )


def _cloud_data_problems(data: DataConfig) -> Iterator[Problem]:
    if not data.source.startswith(("builtin:", "gs://")):
        expected = "a gs:// path: a job does not see this machine's files"
        yield Problem("data.source", f"found {show(data.source)}, expected {expected}")
    if data.image_folder and not data.image_folder.startswith("gs://"):
        yield Problem("data.image_folder", f"found {show(data.image_folder)}, expected a gs:// path")


def run_uri(compiled: str, run_id: str, job_name: str) -> str:
    """The run's folder. Raises ConfigError for a run id that cannot be a folder's name."""
    if run_id and not RUN_ID.fullmatch(run_id):
        raise ConfigError(
            f"run_id is {run_id!r}",
            expected="letters, digits, dots, dashes and underscores, at most 128, starting with a letter or digit",
        )
    return run_uri_of(json.loads(compiled)["root_uri"], run_id, job_name)
