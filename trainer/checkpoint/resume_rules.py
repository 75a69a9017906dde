"""Rules of resuming: for each field, whether a run takes it from the run file or it must be unchanged.

A checkpoint's COMMIT holds the values of fields that matter (`settings_of`), without those at their defaults.
docs/reference/resuming.md shows the table.
"""

from __future__ import annotations

import json
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar, Union, cast, get_args, get_origin

from pydantic import BaseModel, JsonValue
from pydantic.fields import FieldInfo

from vlmpipe.trainer.config.arr_coc.relevance import EARLIER_REWARD, REWARD
from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.config.job import JobConfig, JobSections
from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.config.train import TrainConfig

AnySection = TypeVar("AnySection", bound=BaseModel)
Outcome = Literal["taken", "refused", "prepared", "same"]
SECTIONS: dict[str, type[BaseModel]] = {"train": TrainConfig, "data": DataConfig, "model": ModelConfig}
OUTCOMES: dict[Outcome, str] = {
    "taken": "the run file's value counts from the first step after the resume; training says that it changed",
    "refused": "the resume ends with exit code 64",
    "prepared": "the resume ends with exit code 64 if other data was prepared",
    "same": "the run file's value counts, and the training is the same but for rounding",
}
SELECTION_REWARD = "the reward of drawn selections"  # among the settings: no field, but what a version computes


@dataclass(frozen=True)
class Rule:
    """Effect of a changed value of these fields."""

    outcome: Outcome
    fields: tuple[str, ...]
    why: str


def _in(section: str, names: str) -> tuple[str, ...]:
    return tuple(f"{section}.{name}" for name in names.split())


RULES: tuple[Rule, ...] = (
    Rule(
        "taken",
        _in(
            "train",
            "optimizer.name optimizer.learning_rate optimizer.projector_learning_rate optimizer.tower_learning_rate "
            "optimizer.batch_scaling optimizer.reference_batch_size optimizer.weight_decay optimizer.betas "
            "optimizer.eps clip_grad_norm dpo_beta simpo_beta simpo_gamma",
        ),
        "How an update is made. Moments are kept.",
    ),
    Rule(
        "taken",
        _in("train", "epochs max_steps lr_schedule warmup_fraction warmup_steps decay_fraction final_rate_fraction"),
        "The learning rate is a function of the step and of all steps: with other ones it may jump, and training says "
        "from where to where.",
    ),
    Rule(
        "taken",
        _in("train", "early_stopping.patience early_stopping.min_improvement best_metric"),
        "When training ends. Validations of another metric are not compared with those before.",
    ),
    Rule(
        "taken",
        _in("train", "ema_decay"),
        "An average that the checkpoint lacks begins at its weights; one that is no longer kept is dropped.",
    ),
    Rule(
        "taken",
        _in("model", "lora.targets"),
        "Layers with adapters, whose default may be another one in an earlier version. A checkpoint with adapters of "
        "other layers is refused, with its own targets.",
    ),
    Rule("taken", _in("train", "router_loss"), "A further part of the training loss."),
    Rule(
        "taken",
        _in("train", "reduce_dtype float8 gradient_compression deterministic deepspeed"),
        "How numbers are rounded.",
    ),
    Rule(
        "taken",
        _in("train", "precision gradient_accumulation_dtype"),
        "Types of weights and of sums. Masters and moments are fp32 in every checkpoint.",
    ),
    Rule(
        "same",
        _in(
            "train",
            "strategy tensor_parallel sequence_parallel pipeline_parallel virtual_stages context_parallel "
            "micro_batch_size offload shard_frozen_weights reshard_after_forward prefetch_layers "
            "activation_checkpointing tower_activation_checkpointing activation_offloading loss_chunk_tokens "
            "compile compile_backend",
        ),
        "Where and how the same sums are computed. With another number of ranks or other degrees, dropout continues "
        "with draws of its own.",
    ),
    Rule(
        "refused",
        (
            *_in("train", "seed global_batch_size"),
            *_in("data", "pack max_questions_per_image shuffle_shards stopping_strategy train_share"),
        ),
        "Which samples a step reads.",
    ),
    Rule(
        "refused",
        _in("data", "phases[].epochs phases[].weights sources[].weight sources[].samples sources[].epochs"),
        "Which samples a step reads, also in phases that have not begun.",
    ),
    Rule("refused", _in("train", "objective"), "What is learned, and from which data."),
    Rule(
        "same",
        _in(
            "train",
            "wandb.project wandb.entity wandb.api_key_secret mlflow.tracking_uri mlflow.experiment log_every_steps "
            "validate_every_steps validation_sequences checkpoint_every_steps keep_checkpoints "
            "measure_communication profile.start_step profile.steps profile.ranks stall_factor stall_floor_s",
        ),
        "What is measured, logged and kept.",
    ),
    Rule("same", _in("train", "resume"), "Read when a job starts: see above."),
    Rule(
        "refused",
        _in("train", "trainer.name"),
        "Each program has checkpoints of its own, and so has vlmpipe's trainer.",
    ),
    Rule(
        "taken",
        _in(
            "train",
            "trainer.kind trainer.image_uri trainer.package_uris trainer.executor_image_uri trainer.python_module "
            "trainer.python trainer.command trainer.resume_args trainer.resume_as_model trainer.launch "
            "trainer.roles.ps trainer.roles.evaluator trainer.roles.ps_machine_type trainer.data_format "
            "trainer.result trainer.total_steps trainer.stop_grace_s trainer.evaluate_command",
        ),
        "Given to a program of one's own when it starts. What it does with its checkpoint is its own.",
    ),
    Rule(
        "prepared",
        _in(
            "data",
            "source source_arguments image_folder sources[].uri sources[].arguments sources[].image_folder "
            "sources[].caption_question sources[].replay sources[].replay_about sources[].replay_images "
            "sources[].replay_prompts sources[].replay_max_new_tokens sources[].replay_seed "
            "sources[].max_samples sources[].name columns.id columns.split columns.messages columns.question "
            "columns.answer columns.image columns.weight columns.ignored sources[].columns.id sources[].columns.split "
            "sources[].columns.messages sources[].columns.question sources[].columns.answer sources[].columns.image "
            "sources[].columns.weight sources[].columns.ignored caption_question exclude slices chat_template "
            "answer_end turns share_prefix "
            "max_samples "
            "validation_fraction split_by max_reject_fraction duplicates max_image_pixels max_image_bytes "
            "max_media_bytes video video_frames video_fps video_times min_image_side max_image_aspect animated "
            "shard_samples chunk_samples sequence_length max_images_per_sequence overlong_policy allowed_tokens "
            "file_splits max_image_share max_split_error grey_bits fetch",
        ),
        "What the samples are. Prepared data is named by its content.",
    ),
    Rule(
        "same",
        _in(
            "data",
            "workers loader_threads tasks shard_cache_gib shard_reading max_source_passes max_fetched_images "
            "max_fetched_gib max_fetch_hours sources[].license",
        ),
        "How data is prepared and kept, what is refused at the start, and its licence.",
    ),
    Rule("same", _in("model", "hub_token_secret lora.export"), "Access to weights, and the form of the export."),
    Rule(
        "refused",
        _in(
            "model",
            "family pretrained.weights pretrained.revision pretrained.config tower.weights tower.revision "
            "tower.config projector.weights projector.revision projector.config language_model.weights "
            "language_model.revision language_model.config tokenizer tokenizer_revision feature_layer feature_select "
            "image_size longest_edge min_pixels max_pixels image_processor freeze freeze_parameters train_parameters "
            "lora.rank lora.alpha lora.use_rslora lora.use_dora lora.parts lora.dropout lora.pretrained "
            "lora.train_tokens "
            "lora.quantize_base relevance.channels relevance.scorers relevance.balancer relevance.allocation "
            "relevance.max_tokens relevance.min_tokens relevance.mass relevance.temperature relevance.explore "
            "relevance.estimator relevance.samples relevance.token_cost relevance.centre_questions relevance.width "
            "seed",
        ),
        "What is trained, and from which weights. Frozen weights and those of the vision encoder are compared by their "
        "digests too.",
    ),
)


@dataclass(frozen=True)
class Change:
    """A field whose value differs from that of the start that saved the checkpoint."""

    field: str
    was: JsonValue
    now: JsonValue
    outcome: Outcome
    is_gone: bool = False  # this version has no such field
    is_of_version: bool = False  # no run file sets it

    def text(self) -> str:
        if self.is_gone:
            return f"{self.field} was {_shown(self.was)}, a field that only the vlmpipe that saved it has"
        was, now = _shown(self.was), _shown(self.now)
        if was == now:  # they differ after what is shown, as addresses in long folders do
            was, now = json.dumps(self.was), json.dumps(self.now)
        return f"{self.field} changed from {was} to {now}"


def rules_by_field() -> dict[str, Rule]:
    """The rule of each field."""
    return {field: rule for rule in RULES for field in rule.fields}


def settings_of(job: JobSections) -> dict[str, JsonValue]:
    """Values of the fields whose change is refused or said, as JSON; fields at their defaults are left out."""
    recorded = {field for rule in RULES if rule.outcome in ("taken", "refused") for field in rule.fields}
    values = {field: _value_at(job, field) for field in recorded if not field.startswith("train.trainer.")}
    relevance = job.model.relevance
    computed = {SELECTION_REWARD: REWARD} if relevance and relevance.learns else {}
    return {field: values[field] for field in sorted(values) if values[field] != _DEFAULTS[field]} | computed


def as_trained(job: JobConfig, settings: Mapping[str, JsonValue]) -> JobConfig:
    """The job with the settings that its training had, by `settings_of` then, in place of those that a resume takes.

    A run file that has changed since the last step says nothing about the model. Not validated: to be read.
    """
    train, model = job.train, job.model
    for rule in RULES:
        for field in rule.fields if rule.outcome == "taken" else ():
            if field.startswith("train.") and not field.startswith("train.trainer."):
                train = _with_value(train, field.split(".")[1:], settings.get(field, _DEFAULTS[field]))
            elif field.startswith("model.") and model.lora:
                model = _with_value(model, field.split(".")[1:], _recorded(settings, field))
    return job.model_copy(update={"train": train, "model": model})


def _with_value(section: AnySection, path: Sequence[str], value: object) -> AnySection:
    """A copy of a section with a value at a path; where a section on the way is null, it stays so."""
    name, *rest = path
    inner = getattr(section, name)
    if rest:
        value = inner and _with_value(inner, rest, value)
    return section.model_copy(update={name: value})


def changes(recorded: Mapping[str, JsonValue], expected: Mapping[str, JsonValue]) -> list[Change]:
    """Fields of two `settings_of` that differ, those that are refused first.

    A field that one of them does not have in a section that it has is at its default: its version knew no such field.
    """
    rules = rules_by_field()
    differing = []
    for field in sorted({*recorded, *expected} - {SELECTION_REWARD}):
        was, now = _recorded(recorded, field), _recorded(expected, field)
        if was != now:
            # A field that this version does not have decided something for the one that saved.
            outcome = rules[field].outcome if field in rules else "refused"
            differing.append(Change(field, was, now, outcome, is_gone=field not in rules))
    return sorted([*differing, *_other_reward(recorded, expected)], key=lambda change: change.outcome != "refused")


def _other_reward(recorded: Mapping[str, JsonValue], expected: Mapping[str, JsonValue]) -> Iterator[Change]:
    """The change of the reward, where both settings draw selections."""
    if all(settings.get("model.relevance.estimator") == "rloo" for settings in (recorded, expected)):
        was, now = (settings.get(SELECTION_REWARD, EARLIER_REWARD) for settings in (recorded, expected))
        if was != now:
            yield Change(SELECTION_REWARD, was, now, "refused", is_of_version=True)


def _recorded(settings: Mapping[str, JsonValue], field: str) -> JsonValue:
    section = f"{field.rpartition('.')[0]}."
    has_section = field in _OF_OPTIONAL_SECTIONS and any(other.startswith(section) for other in settings)
    return settings.get(field, (_OF_OPTIONAL_SECTIONS if has_section else _DEFAULTS).get(field))


def leaves(section: type[BaseModel], prefix: str) -> Iterator[tuple[str, FieldInfo, bool]]:
    """Dotted path of each field that is no section, the field, and whether a section above it may be null.

    Fields of the sections in a list have `[]` after the list's name.
    """
    for name, field in section.model_fields.items():
        below, is_list, may_lack = _section_of(field)
        path = f"{prefix}.{name}{'[]' if is_list else ''}"
        if below is None:
            yield path, field, False
            continue
        for inner, leaf, lacks in leaves(below, path):
            yield inner, leaf, lacks or may_lack or is_list


def _section_of(field: FieldInfo) -> tuple[type[BaseModel] | None, bool, bool]:
    """The section that a field holds, if it is one; whether it holds a list of them; whether it may be null."""
    annotation = field.annotation
    options = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    for option in options:
        is_list = get_origin(option) is tuple
        held = get_args(option)[0] if is_list else option
        if isinstance(held, type) and issubclass(held, BaseModel):
            return held, is_list, type(None) in options
    return None, False, False


def _default_of(path: str, field: FieldInfo, lacks: bool) -> JsonValue:
    if lacks:
        return [] if "[]" in path else None
    return None if field.is_required() else _plain(field.get_default(call_default_factory=True, validated_data={}))


def _value_at(job: JobSections, path: str) -> JsonValue:
    """The value at a dotted path, as JSON; of fields in a list that of each item, None below a null section."""
    section: BaseModel | None = job
    name, _, rest = path.partition(".")
    while rest and not name.endswith("[]"):
        section = getattr(section, name)
        if section is None:
            return None
        name, _, rest = rest.partition(".")
    value = getattr(section, name.removesuffix("[]"))
    return [_plain(getattr(item, rest)) for item in value] if rest else _plain(value)


def _plain(value: object) -> JsonValue:
    return cast(JsonValue, json.loads(json.dumps(value)))


def _shown(value: JsonValue) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


_DEFAULTS = {
    path: _default_of(path, field, lacks)
    for name, section in SECTIONS.items()
    for path, field, lacks in leaves(section, name)
}
# Of fields in sections that may be null, the defaults where they are not.
_OF_OPTIONAL_SECTIONS = {
    path: _default_of(path, field, lacks=False)
    for name, section in SECTIONS.items()
    for path, field, lacks in leaves(section, name)
    if lacks and "[]" not in path
}
