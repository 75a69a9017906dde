"""RunConfig: the schema of the run file, and the checks that concern several of its sections.

Sections that jobs read are in `trainer.config`, the others in `vlmpipe.config`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from trainer.config.base import Section
from trainer.config.checkpoint import CheckpointConfig
from trainer.config.data import OWN_FORMAT, DataConfig
from trainer.config.job import EvaluateConfig, FeaturesConfig, RunPaths
from trainer.config.model import GRID_FAMILIES, MOST_ASPECT, ModelConfig
from trainer.config.strategies import DECOMPOSING, PIPELINE_PARALLEL, QUANTIZING, TENSOR_PARALLEL
from trainer.config.train import TrainConfig
from trainer.secret_detection import known_form
from trainer.sizing.deepspeed_config import uses_hpz
from vlmpipe.config.cluster import FLEX_START_MOST_TIMEOUT_S, ClusterConfig, duration_s
from vlmpipe.config.gcp import GcpConfig
from vlmpipe.config.kubeflow import KubeflowConfig
from vlmpipe.config.notify import NotifyConfig
from vlmpipe.config.output import GateConfig, OutputConfig, RegisterConfig
from vlmpipe.config.plan import PlanConfig
from vlmpipe.config.run_references import with_exports
from vlmpipe.config.schedule import ScheduleConfig
from vlmpipe.config.stages import StageConfig, problems_of_stages, stage_contents, stage_problems, with_overrides
from vlmpipe.config.tune import TuneConfig
from vlmpipe.config.validation_errors import (
    Problem,
    ProblemsError,
    RunFileError,
    closest_field,
    from_validation_error,
    show,
)
from vlmpipe.config.yaml_loader import parse_overrides, read_run_file

BUILTIN_SOURCES = ("builtin:digits", "builtin:easy-vqa", "builtin:openmoji")
ALL_REDUCE_STRATEGIES = ("ddp", "zero1", "zero2", "hsdp")


def _known_source(data: DataConfig) -> DataConfig:
    if data.source.startswith("builtin:") and data.source not in BUILTIN_SOURCES:
        closest = closest_field(data.source, BUILTIN_SOURCES)
        hint = f"; did you mean {closest}?" if closest else ""
        text = f"found {show(data.source)}, expected one of {', '.join(BUILTIN_SOURCES)}{hint}"
        raise ProblemsError([Problem("data.source", text)])
    return data


class RunConfig(Section):
    """A run: model, data, training, machines, and the conditions for registering the model."""

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
        default_factory=CheckpointConfig, description="How checkpoints are written and retained."
    )
    evaluate: EvaluateConfig = Field(default_factory=EvaluateConfig, description="Evaluation on held-out samples.")
    output: OutputConfig = Field(default_factory=OutputConfig, description="Where everything is written.")
    cluster: ClusterConfig = Field(default_factory=ClusterConfig, description="The machines of the jobs.")
    gate: GateConfig = Field(default_factory=GateConfig, description="The conditions for registering a model.")
    # `register` would hide a method that pydantic's models have from abc.ABCMeta.
    register_: RegisterConfig = Field(
        default_factory=RegisterConfig, alias="register", description="How an accepted model is registered."
    )
    stages: tuple[StageConfig, ...] = Field(
        (),
        description="Trainings that follow each other, each from the model of the one before: the run file with a "
        "stage's own values in its place. Left out, the run file is the only one.",
    )
    schedule: ScheduleConfig | None = Field(None, description="Recurring runs on Vertex AI; null for none.")
    tune: TuneConfig | None = Field(None, description="A search over fields of train; null for none.")
    notify: NotifyConfig = Field(default_factory=NotifyConfig, description="Who is notified when a run ends.")
    plan: PlanConfig = Field(
        default_factory=PlanConfig, description="What vlmpipe plan assumes, and what needs confirmation."
    )
    gcp: GcpConfig = Field(default_factory=GcpConfig, description="The Google Cloud project. Vertex AI only.")
    kubeflow: KubeflowConfig = Field(
        default_factory=KubeflowConfig, description="The Kubernetes cluster of --target kubeflow."
    )

    @field_validator("stages")
    @classmethod
    def _some_stage(cls, stages: tuple[StageConfig, ...]) -> tuple[StageConfig, ...]:
        if not stages:
            raise ValueError("expected at least one stage; leave stages out where the run file is the only one")
        return stages

    @model_validator(mode="after")
    def _sections_fit(self) -> RunConfig:
        in_sections = _stages_problems(self) if self.stages else _cross_section_problems(self)
        if problems := [*_secrets(self.to_dict()), *in_sections]:
            raise ProblemsError(problems)
        return self

    @cached_property
    def source(self) -> tuple[str, ...]:
        """The run file on the command line: path and overrides, set by `load_run_file`; otherwise its name."""
        return (self.name,)

    @property
    def model_name(self) -> str:
        """Name in the registry."""
        return self.register_.model_name or self.name

    def root_uri(self, target: Literal["local", "vertex", "kubeflow"]) -> str:
        """Root of runs, prepared data, features and the registry. Only local runs can use a local folder."""
        if target != "local" and not self.output.root_uri.startswith("gs://"):
            return self.gcp.pipeline_root
        return self.output.root_uri

    def stage_runs(self) -> dict[str, RunConfig]:
        """The run file of each stage, by the stage's name; without stages this one, under an empty name.

        Its `model` section is where the first stage starts. The last stage is the run itself.
        """
        if not self.stages:
            return {"": self}
        return {name: RunConfig.model_validate(content) for name, content in self._stage_contents().items()}

    def _stage_contents(self) -> dict[str, dict[str, Any]]:
        # Without defaults, so that each stage's file knows which fields were given.
        given = self.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude={"stages"})
        return stage_contents(given, self.stages)

    def to_dict(self) -> dict[str, Any]:
        """The run file with all defaults, in JSON's types."""
        return self.model_dump(mode="json", by_alias=True, exclude=None if self.stages else {"stages"})

    def to_run_json(self, run: RunPaths) -> dict[str, Any]:
        """The effective run file of one run, as `resolve_run` writes it and `JobConfig.load` reads it."""
        sections = self.to_dict()
        return {"version": sections.pop("version"), "name": sections.pop("name"), "run": run.model_dump(), **sections}

    def digest(self) -> str:
        """sha256 (hex) of everything in the run file; equal for files that differ in form only."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()


def load_run_file(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read and check a run file with `a.b=c` overrides applied. Raises ConfigError that lists every problem."""
    config = parse_run_config(with_overrides(read_run_file(Path(path)), parse_overrides(overrides)), str(path))
    config.__dict__["source"] = (str(path), *overrides)  # as cached_property stores it; not part of equality
    return config


def parse_run_config(data: Mapping[str, Any], source: str) -> RunConfig:
    """Check a run file's content. `source` names it in the error, a RunFileError that lists every problem."""
    try:
        return RunConfig.model_validate(with_exports(data, source))
    except ValidationError as error:
        raise RunFileError(source, from_validation_error(error, RunConfig)) from None


def warnings(config: RunConfig) -> list[Problem]:
    """Settings that are allowed but have no effect or are probably not intended."""
    return list(_warnings(config))


def _warnings(config: RunConfig) -> Iterator[Problem]:
    if config.stages:
        *earlier, last = config.stage_runs().items()
        found = {name: [one for one in _warnings(run) if one.field != "gate"] for name, run in earlier}
        yield from problems_of_stages(found | {last[0]: list(_warnings(last[1]))})
        return
    cluster, data, train = config.cluster, config.data, config.train
    if data.answer_end and data.chat_format(config.model) == OWN_FORMAT:
        yield Problem("data.answer_end", "has no effect: data.chat_template vlmpipe ends answers itself")
    if data.image_folder and (data.source.startswith("builtin:") or data.source.endswith(".tar")):
        yield Problem("data.image_folder", f"has no effect: {data.source} brings its own pictures")
    if cluster.capacity_fallback and "scheduling_strategy" not in cluster.model_fields_set:
        text = "is left at standard, which features and evaluation use: capacity_fallback is for the training job only"
        yield Problem("cluster.scheduling_strategy", text)
    if "max_wait_duration" in cluster.model_fields_set and cluster.scheduling_strategy != "flex_start":
        text = "has no effect: only cluster.scheduling_strategy flex_start waits"
        yield Problem("cluster.max_wait_duration", text)
    if "decay_fraction" in train.model_fields_set and train.lr_schedule != "wsd":
        yield Problem("train.decay_fraction", "has no effect: only train.lr_schedule wsd has a decay of its own")
    if train.float8 != "none" and not cluster.accelerator_count:
        yield Problem("train.float8", "is emulated without GPUs: slower than bf16, for tests")
    if train.zero_hpz and not uses_hpz(nodes=cluster.replica_count, node_ranks=cluster.processes):
        why = "one node already has all weights"
        if cluster.replica_count > 1:
            why = "with one process a node its copy would be whole, which is strategy zero2"
        yield Problem("train.zero_hpz", f"has no effect: {why}")
    if cluster.replica_count > 1 and not cluster.restart_job_on_worker_restart:
        text = "is false with several nodes: one that Vertex AI restarts cannot rejoin the others, and the job hangs"
        yield Problem("cluster.restart_job_on_worker_restart", text)
    if config.register_.serving and not config.register_.registry.startswith("vertex://"):
        yield Problem("register.serving", "has no effect: only register.registry vertex://MODEL_ID serves")
    if not config.gate.checks_something:
        yield Problem("gate", "sets no bound: every model is accepted and registered")
    for path, image in (("cluster.image_uri", cluster.image_uri), ("gcp.pipeline_image", config.gcp.pipeline_image)):
        if image and "@sha256:" not in image:
            yield Problem(path, "names an image by tag, which may change; a digest (@sha256:...) does not")


def _secrets(value: Any, path: str = "") -> Iterator[Problem]:
    """Values of a well-known secret's form, in any field. The value is not repeated."""
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _secrets(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, str) and (form := known_form(value)):
        text = f"holds a secret ({form}), and everybody who may see the pipeline can read it; keep it in Secret Manager"
        yield Problem(path, text)


def _stages_problems(config: RunConfig) -> list[Problem]:
    contents = config._stage_contents()
    own = list(stage_problems(config.name, config.stages, contents, is_search=config.tune is not None))
    return own or problems_of_stages({name: _problems_of(content) for name, content in contents.items()})


def _problems_of(content: Mapping[str, Any]) -> list[Problem]:
    try:
        RunConfig.model_validate(content)
    except ValidationError as error:
        return from_validation_error(error, RunConfig)
    return []


def _cross_section_problems(config: RunConfig) -> Iterator[Problem]:
    model, train, register = config.model, config.train, config.register_
    is_trained, is_cached = "tower" not in model.freeze, config.features.cache == "on"
    if is_cached and is_trained:
        what = "has adapters" if model.lora and "tower" in model.lora.parts else "is trained"
        text = f"found on, but the tower {what}, so its output changes; expected tower in model.freeze, or off"
        yield Problem("features.cache", text)
    if model.family == "hf":
        yield from _generic_model_problems(config)
    if train.overlap_vision_encoder and (is_trained or is_cached):
        state = "is trained" if is_trained else "does not run: features.cache is on"
        text = f"found true, but the tower {state}; expected tower in model.freeze and cache off"
        yield Problem("train.overlap_vision_encoder", text)
    yield from _adapter_problems(config)
    if model.family in GRID_FAMILIES and config.data.max_image_aspect > MOST_ASPECT:
        found = f"found {config.data.max_image_aspect:g} with model.family {model.family}"
        text = f"{found}, whose images keep their shape; expected at most {MOST_ASPECT:g}"
        yield Problem("data.max_image_aspect", text)
    yield from _rank_problems(config)
    if not 0 < config.data.validation_fraction < 1:
        yield Problem(
            "data.validation_fraction",
            f"found {config.data.validation_fraction:g}, expected more than 0 and less than 1: a run trains on one "
            "part of its samples and is evaluated on the other",
        )
    yield from _capacity_problems(config)
    if "cider_d" in config.gate.min_scores and config.evaluate.cider_d == "off":
        text = "found with evaluate.cider_d off, which gives none; expected auto or on"
        yield Problem("gate.min_scores.cider_d", text)
    if "preference_accuracy" in config.gate.min_scores and not train.in_pairs:
        text = f"found with train.objective {train.objective}, which has no pairs; expected objective dpo"
        yield Problem("gate.min_scores.preference_accuracy", text)
    if register.registry.startswith("vertex://"):
        missing = f"missing, found register.registry {register.registry}; expected"
        if register.serving is None:
            text = f"{missing} image_uri of a serving container, which Vertex AI asks for"
            yield Problem("register.serving", text)
        if not config.gcp.project:
            yield Problem("gcp.project", f"{missing} the project that holds the model")


def _generic_model_problems(config: RunConfig) -> Iterator[Problem]:
    """What a model of any type cannot do: its own forward pass knows no parts."""
    train = config.train
    if config.features.cache == "on":
        text = "found on with model.family hf, whose features are not cached; expected auto or off"
        yield Problem("features.cache", text)
    if train.strategy in (*TENSOR_PARALLEL, *PIPELINE_PARALLEL):
        text = f"found {train.strategy} with model.family hf, whose layers are not split between ranks; expected fsdp"
        yield Problem("train.strategy", text)
    if train.context_parallel > 1:
        text = f"found {train.context_parallel} with model.family hf, whose sequences are not shared; expected 1"
        yield Problem("train.context_parallel", text)
    if train.overlap_vision_encoder:
        text = "found true with model.family hf, whose forward pass runs the tower itself; expected false"
        yield Problem("train.overlap_vision_encoder", text)


def _adapter_problems(config: RunConfig) -> Iterator[Problem]:
    model, train, lora = config.model, config.train, config.model.lora
    if lora is None:
        return
    if model.quantizes_base and train.strategy not in QUANTIZING:
        yield Problem(
            "model.lora.quantize_base",
            f"found nf4 with train.strategy {train.strategy}, which cannot shard 4-bit weights; expected one of "
            f"{', '.join(QUANTIZING)}, such as train.strategy ddp: every rank holds the small base whole",
        )
    if model.quantizes_base and train.compile == "on":
        text = "found on with model.lora.quantize_base, whose kernels torch.compile cannot trace; expected auto or off"
        yield Problem("train.compile", text)
    if model.quantizes_base and train.float8 != "none":
        text = f"found {train.float8} with model.lora.quantize_base, which is not compiled; expected none"
        yield Problem("train.float8", text)
    if lora.use_dora and train.strategy not in DECOMPOSING:
        expected = f"expected one of {', '.join(DECOMPOSING)}, such as fsdp"
        text = f"found true with train.strategy {train.strategy}, which shards the weights it measures; {expected}"
        yield Problem("model.lora.use_dora", text)
    if lora.use_dora and train.float8 != "none":
        text = f"found {train.float8} with model.lora.use_dora, which measures the weights; expected none"
        yield Problem("train.float8", text)
    if set(lora.parts) != {"language_model"} and train.tensor_parallel > 1:
        text = f"found with train.strategy {train.strategy}, which shards adapters of the language model only"
        yield Problem("model.lora.parts", f"{text}; expected [language_model], or a strategy such as fsdp")
    alone = {"export": lora.export == "adapter", "pretrained": bool(lora.pretrained)}
    for name in (name for name, is_set in alone.items() if is_set):
        if not (model.pretrained and model.pretrained.weights):
            text = "found without model.pretrained.weights, the base that an adapter belongs to; expected that, such as"
            yield Problem(f"model.lora.{name}", f"{text} run:RUN_ID of a run that exported the whole model")
        if model.quantizes_base:
            text = "found with quantize_base; an adapter trained on 4-bit weights gives other answers on the base"
            yield Problem(f"model.lora.{name}", f"{text}; expected export merged, or no quantize_base")
    if lora.export == "adapter" and config.register_.serving:
        text = "found with model.lora.export adapter, which a serving container has no base for; expected merged"
        yield Problem("register.serving", text)


def _rank_problems(config: RunConfig) -> Iterator[Problem]:
    """Whether ranks divide into model replicas, and the batch into micro-batches."""
    train, cluster, length = config.train, config.cluster, config.data.sequence_length
    if cluster.processes % train.tensor_parallel:
        expected = f"a divisor of the {cluster.processes} processes of a node: layers are split inside a node"
        yield Problem("train.tensor_parallel", f"found {train.tensor_parallel}, expected {expected}")
    if train.sequence_parallel and length % train.tensor_parallel:
        expected = f"a multiple of train.tensor_parallel {train.tensor_parallel}"
        text = f"found with data.sequence_length {length}, expected {expected}: so many ranks share a sequence's tokens"
        yield Problem("train.sequence_parallel", text)
    if length % train.context_parallel:
        text = f"found {train.context_parallel} with data.sequence_length {length}, expected a divisor of it"
        yield Problem("train.context_parallel", text)
    in_node = cluster.processes % train.context_parallel == 0 or train.context_parallel % cluster.processes == 0
    if cluster.world_size % train.context_parallel or not in_node:
        expected = f"a divisor of the {cluster.processes} processes of a node, or whole nodes that divide all"
        yield Problem("train.context_parallel", f"found {train.context_parallel}, expected {expected}")
    if cluster.world_size % train.model_ranks:
        found = f"found {train.pipeline_parallel} with train.tensor_parallel {train.tensor_parallel}"
        text = f"{found}, expected ranks ({cluster.world_size}) that are a multiple of {train.model_ranks}"
        yield Problem("train.pipeline_parallel", text)
    groups = max(1, cluster.world_size // train.sequence_ranks)
    step_sequences = groups * train.micro_batch_size
    if train.global_batch_size % step_sequences:
        each = f", {train.sequence_ranks} with the same sequences" if train.sequence_ranks > 1 else ""
        yield Problem(
            "train.global_batch_size",
            f"found {train.global_batch_size}, expected a multiple of {step_sequences} = {groups} "
            f"{'groups' if each else 'ranks'} (cluster.replica_count {cluster.replica_count} x {cluster.processes} "
            f"processes{each}) x train.micro_batch_size {train.micro_batch_size}",
        )


def _capacity_problems(config: RunConfig) -> Iterator[Problem]:
    train, cluster, fallback = config.train, config.cluster, config.cluster.capacity_fallback
    if not cluster.accelerator_count:
        for name in train.quantized:
            yield Problem(f"train.{name}", "found without GPUs, expected GPU nodes (its kernels are CUDA's), or false")
    if fallback and train.resume == "never":
        text = "found never with cluster.capacity_fallback, whose next option continues; expected auto"
        yield Problem("train.resume", text)
    if fallback and config.gcp.persistent_resource_id:
        text = "found with gcp.persistent_resource_id, whose machines are there already"
        yield Problem("cluster.capacity_fallback", text)
    flex_start = "cluster.scheduling_strategy" if cluster.scheduling_strategy == "flex_start" else ""
    if any(option.scheduling_strategy == "flex_start" for option in fallback):
        flex_start = "cluster.capacity_fallback"
    if cluster.reduction_server:
        for text in _reduction_server_problems(config, flex_start):
            yield Problem("cluster.reduction_server", text)
    if flex_start and not cluster.accelerator_count:
        yield Problem(flex_start, "found flex_start without GPUs, expected accelerator_type and _count")
    if flex_start and duration_s(cluster.timeout) > FLEX_START_MOST_TIMEOUT_S:
        text = f"found {cluster.timeout}, expected at most {FLEX_START_MOST_TIMEOUT_S}s with flex_start"
        yield Problem("cluster.timeout", text)


def _reduction_server_problems(config: RunConfig, flex_start: str) -> Iterator[str]:
    """`flex_start`: the field that asks for it, if any."""
    if config.cluster.replica_count < 2:
        yield "found with 1 node, expected cluster.replica_count of at least 2, or null"
    if config.train.strategy not in ALL_REDUCE_STRATEGIES:
        yield (
            f"found with train.strategy {config.train.strategy}, which sums no gradients by all-reduce, so reducers "
            f"would idle; expected one of {', '.join(ALL_REDUCE_STRATEGIES)}, or null"
        )
    if not config.cluster.accelerator_count:
        yield "found without GPUs, expected GPU nodes (it works through NCCL)"
    if flex_start:
        yield f"found with {flex_start} flex_start, which needs equal machines in all pools; expected null"
