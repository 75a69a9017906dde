"""The run file's `train` section, and which of its settings exclude each other."""

from __future__ import annotations

import math

from pydantic import ValidationInfo, field_validator, model_validator

from vlmpipe.trainer.config import deepspeed_keys
from vlmpipe.trainer.config.strategies import (
    COMPILING,
    COMPUTING_IN_FLOAT8,
    CONTEXT_PARALLEL,
    GATHERED_IN_BF16,
    GATHERING,
    OF_OBJECTIVES,
    OFFLOADING,
    OFFLOADING_ACTIVATIONS,
    PIPELINE_PARALLEL,
    PREFERRING,
    REDUCING_IN_BF16,
    SHARDING_FROZEN,
    STATE_IN_8_BITS,
    SUMMING_IN_BF16,
    TENSOR_PARALLEL,
    sums_offloaded_in_bf16,
)
from vlmpipe.trainer.config.train_fields import TrainFields


class TrainConfig(TrainFields):
    """How the model is trained."""

    @model_validator(mode="after")
    def _strategy_supports_it(self) -> TrainConfig:
        _require_support(self)
        return self

    @model_validator(mode="after")
    def _number_types_work_together(self) -> TrainConfig:
        _require_state_types(self)
        _require_compression(self)
        return self

    @field_validator("deepspeed")
    @classmethod
    def _deepspeed_is_ours_in_part(cls, deepspeed: dict[str, object], info: ValidationInfo) -> dict[str, object]:
        """Validate the field by itself, so that its problems are said next to those of other fields."""
        strategy = info.data.get("strategy", "zero1")  # an unknown one is its own problem
        if problems := deepspeed_keys.problems(deepspeed, strategy):
            raise ValueError("\n".join(problems))
        return deepspeed

    @model_validator(mode="before")
    @classmethod
    def _warmup_steps_replace_the_default(cls, values: object) -> object:
        """Set the fraction to null where steps are given in its place, so that exactly one of them holds."""
        if not isinstance(values, dict) or values.get("warmup_steps") is None or "warmup_fraction" in values:
            return values
        return {**values, "warmup_fraction": None}

    @model_validator(mode="after")
    def _schedule_fits(self) -> TrainConfig:
        if self.warmup_fraction is None and self.warmup_steps is None:
            raise ValueError("warmup_fraction and warmup_steps are both null: give one of them, 0 for no warm-up")
        if self.warmup_fraction is not None and self.warmup_steps is not None:
            raise ValueError(
                f"warmup_steps {self.warmup_steps} and warmup_fraction {self.warmup_fraction} both say how long the "
                "learning rate rises: take one out, or set it to null"
            )
        if self.lr_schedule == "wsd" and (self.warmup_fraction or 0.0) + self.decay_fraction > 1:
            raise ValueError(
                f"warmup_fraction {self.warmup_fraction} and decay_fraction {self.decay_fraction} are more than all "
                "steps: they share 1 between them"
            )
        if self.max_steps and (problem := warmup_problem(self, self.max_steps)):
            raise ValueError(problem)
        return self

    @model_validator(mode="after")
    def _scaling_has_a_reference(self) -> TrainConfig:
        scaling, reference = self.optimizer.batch_scaling, self.optimizer.reference_batch_size
        if (scaling == "none") != (reference == 0):
            raise ValueError(
                f"optimizer.batch_scaling {scaling} and optimizer.reference_batch_size {reference}: give both, or none "
                "and 0"
            )
        return self

    @model_validator(mode="after")
    def _divisible(self) -> TrainConfig:
        if problem := best_problem(self, "early_stopping"):
            raise ValueError(problem)
        if self.best_metric == "validation_exact_match" and not self.loss_chunk_tokens:
            raise ValueError(
                "best_metric validation_exact_match needs loss_chunk_tokens above 0: it is counted by chunks of labels"
            )
        if self.global_batch_size % self.micro_batch_size:
            raise ValueError(
                f"global_batch_size {self.global_batch_size} must be a multiple of micro_batch_size "
                f"{self.micro_batch_size}"
            )
        return self


def best_problem(train: TrainFields, setting: str) -> str:
    """Problem of a `setting` that compares validations while training; empty for none."""
    if setting == "early_stopping" and train.early_stopping is None:
        return ""
    if train.in_pairs:
        return (
            f"{setting} does not apply to objective {train.objective}, which takes no validations while training: "
            "leave it out"
        )
    if not train.validate_every_steps:
        return f"{setting} compares validations while training, and validate_every_steps is 0: set it, such as to 100"
    return ""


def warmup_problem(train: TrainConfig, total_steps: int) -> str:
    """Problem of train.warmup_steps in a run of `total_steps`; empty for none. The fraction fits every run."""
    if train.warmup_steps is None or not total_steps:  # a variant without training
        return ""
    decay_steps = train.decay_fraction * total_steps if train.lr_schedule == "wsd" else 0.0
    if train.warmup_steps + decay_steps <= total_steps + 1e-6:  # 0.9 of 10 may be a little more than 9
        return ""
    decay = f" and decay_fraction {train.decay_fraction:g}" if decay_steps else ""
    most = math.floor(total_steps - decay_steps + 1e-6)
    return (
        f"warmup_steps {train.warmup_steps}{decay} are more than all {total_steps} steps: use at most {most}, or "
        "warmup_fraction in its place"
    )


def _require_support(train: TrainConfig) -> None:
    """Raise ValueError for a setting that the strategy does not support, with the nearest that works."""
    for require in (
        _degrees_fit,
        _objective_works,
        _router_loss_works,
        _activation_offloading_works,
        _compiling_works,
        _float8_works,
        _optimizer_state_works,
        _offload_works,
        _frozen_sharding_works,
        _gathering_works,
    ):
        require(train)


def _objective_works(train: TrainConfig) -> None:
    for name, objective in OF_OBJECTIVES.items():
        value = getattr(train, name)
        if train.objective != objective and value != TrainConfig.model_fields[name].default:
            raise ValueError(
                f"{name} {value:g} does not apply to objective {train.objective}: leave it out, or set objective "
                f"{objective}"
            )
    if train.objective == "sft":
        return
    if train.strategy not in PREFERRING or train.context_parallel > 1:
        setting = f"strategy {train.strategy}" if train.context_parallel == 1 else "context_parallel"
        raise ValueError(
            f"objective {train.objective} does not work with {setting}, which shards a pair's tokens or its loss: use "
            f"one of {', '.join(PREFERRING)}, such as fsdp, with context_parallel 1"
        )
    if train.validate_every_steps:
        raise ValueError(
            f"validate_every_steps does not apply to objective {train.objective}: the evaluation measures preferences"
        )


def _router_loss_works(train: TrainConfig) -> None:
    if not train.router_loss or (train.strategy in PREFERRING and train.context_parallel == 1):
        return
    setting = f"strategy {train.strategy}" if train.context_parallel == 1 else "context_parallel"
    raise ValueError(
        f"router_loss {train.router_loss:g} does not work with {setting}, where no rank has the routers of all layers "
        f"and tokens: use one of {', '.join(PREFERRING)}, such as fsdp, with context_parallel 1, or leave it out"
    )


def _degrees_fit(train: TrainConfig) -> None:
    for name, strategies in (("tensor_parallel", TENSOR_PARALLEL), ("pipeline_parallel", PIPELINE_PARALLEL)):
        degree, uses = getattr(train, name), train.strategy in strategies
        if uses and degree == 1:
            raise ValueError(f"strategy {train.strategy} splits the model: give {name}, 2 or more")
        if degree > 1 and not uses:
            raise ValueError(
                f"{name} {degree} does not apply to strategy {train.strategy}: use one of {', '.join(strategies)}"
            )
    if train.context_parallel > 1 and train.strategy not in CONTEXT_PARALLEL:
        nearest = "fsdp"
        if train.strategy in TENSOR_PARALLEL:
            nearest += ", or sequence_parallel, which shares tokens between tensor-parallel ranks"
        raise ValueError(
            f"context_parallel {train.context_parallel} does not work with strategy {train.strategy}, which splits "
            f"attention or layers over ranks itself: use one of {', '.join(CONTEXT_PARALLEL)}, such as {nearest}"
        )
    if train.virtual_stages > 1 and train.pipeline_parallel == 1:
        raise ValueError(
            f"virtual_stages {train.virtual_stages} does not apply to strategy {train.strategy}: use one of "
            f"{', '.join(PIPELINE_PARALLEL)}"
        )
    if train.sequence_parallel and train.strategy not in TENSOR_PARALLEL:
        raise ValueError(
            f"sequence_parallel does not apply to strategy {train.strategy}: use one of "
            f"{', '.join(TENSOR_PARALLEL)}, or leave it out"
        )


def _activation_offloading_works(train: TrainConfig) -> None:
    if not train.activation_offloading:
        return
    if train.strategy not in OFFLOADING_ACTIVATIONS:
        raise ValueError(
            f"activation_offloading does not work with strategy {train.strategy}: use one of "
            f"{', '.join(OFFLOADING_ACTIVATIONS)}, or leave activation_offloading out"
        )
    if train.activation_checkpointing != "full":
        raise ValueError(
            "activation_offloading moves the inputs of recomputed blocks, and activation_checkpointing is "
            f"{train.activation_checkpointing}: set it to full, or leave activation_offloading out"
        )
    if train.compile == "on" or train.float8 != "none":
        raise ValueError(
            "activation_offloading does not work with compiled layers: leave compile at auto and float8 at none, or "
            "leave activation_offloading out"
        )


def _compiling_works(train: TrainConfig) -> None:
    if train.compile == "on" and train.strategy not in COMPILING:
        raise ValueError(
            f"compile on does not work with strategy {train.strategy}, which gathers weights inside of layers: use one "
            f"of {', '.join(COMPILING)}, or leave compile at auto"
        )


def _float8_works(train: TrainConfig) -> None:
    if train.float8 == "none":
        return
    problem = f"float8 {train.float8} does not work with"
    if train.strategy not in COMPUTING_IN_FLOAT8:
        raise ValueError(
            f"{problem} strategy {train.strategy}: use one of {', '.join(COMPUTING_IN_FLOAT8)}, or set float8 to none"
        )
    if train.precision != "bf16":
        raise ValueError(f"{problem} precision {train.precision}: use bf16, whose products these replace")
    if train.compile == "off":
        raise ValueError(f"{problem} compile off, where casts take longer than products save: leave compile at auto")


def _optimizer_state_works(train: TrainConfig) -> None:
    if train.optimizer.name == "adamw_8bit" and (train.strategy not in STATE_IN_8_BITS or train.offload != "none"):
        raise ValueError(
            f"optimizer.name adamw_8bit does not work with strategy {train.strategy} and offload {train.offload}: "
            f"use one of {', '.join(STATE_IN_8_BITS)} with offload none, or optimizer.name adamw"
        )


def _offload_works(train: TrainConfig) -> None:
    able = OFFLOADING.get(train.offload)
    if able and train.strategy not in able:
        other = next((name for name, strategies in OFFLOADING.items() if train.strategy in strategies), "none")
        raise ValueError(
            f"strategy {train.strategy} cannot offload {train.offload}: use one of {', '.join(able)}, or offload "
            f"{other}"
        )


def _frozen_sharding_works(train: TrainConfig) -> None:
    if train.shard_frozen_weights and train.strategy not in SHARDING_FROZEN:
        raise ValueError(
            f"shard_frozen_weights does not work with strategy {train.strategy}: use one of "
            f"{', '.join(SHARDING_FROZEN)}, or zero3, which does so without it"
        )


def _gathering_works(train: TrainConfig) -> None:
    for name, default in (("reshard_after_forward", "auto"), ("prefetch_layers", 1)):
        value = getattr(train, name)
        if value != default and train.strategy not in GATHERING:
            raise ValueError(
                f"{name} {value} does not apply to strategy {train.strategy}: use one of {', '.join(GATHERING)}, "
                "or leave it out"
            )


def _require_state_types(train: TrainConfig) -> None:
    if train.precision == "bf16-autocast" and train.strategy in GATHERED_IN_BF16:
        raise ValueError(
            f"precision bf16-autocast does not work with strategy {train.strategy}, which gathers weights in bf16: use "
            "bf16"
        )
    for name, able in (("gradient_accumulation_dtype", SUMMING_IN_BF16), ("reduce_dtype", REDUCING_IN_BF16)):
        if getattr(train, name) == "fp32":
            continue
        if train.precision != "bf16":
            raise ValueError(f"{name} bf16 does not apply to precision {train.precision}: set precision bf16 too")
        if train.strategy not in able:
            raise ValueError(
                f"{name} bf16 does not work with strategy {train.strategy}: use one of {', '.join(able)}, or fp32"
            )
    if train.gradient_accumulation_dtype == "fp32" and sums_offloaded_in_bf16(
        train.precision, train.offload, train.strategy
    ):
        raise ValueError(
            f"DeepSpeed sums offloaded gradients of strategy {train.strategy} in bf16: use zero3, or set "
            "gradient_accumulation_dtype to bf16"
        )


def _require_compression(train: TrainConfig) -> None:
    compression = train.gradient_compression
    if compression != "none" and train.strategy != "ddp":
        raise ValueError(
            f"gradient_compression {compression} does not work with strategy {train.strategy}: use ddp, or set it to "
            "none; others send gradients in train.reduce_dtype"
        )
    if compression != "none" and train.precision == "bf16":
        raise ValueError(
            f"gradient_compression {compression} does not work with precision bf16: use precision bf16-autocast, or "
            "set reduce_dtype to bf16 in its place"
        )
