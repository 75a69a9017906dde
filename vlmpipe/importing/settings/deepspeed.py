"""A DeepSpeed configuration as fields of `train`. DeepSpeed's own defaults hold where it says nothing."""

from __future__ import annotations

from collections.abc import Mapping

from vlmpipe.importing.cluster import EXAMPLE_GPUS, assume_cluster
from vlmpipe.importing.findings import Outcome, Path, path_text
from vlmpipe.importing.settings.concepts import Concepts, is_on, number
from vlmpipe.importing.settings.training import translate_training
from vlmpipe.importing.settings.words import unknown
from vlmpipe.importing.translation import Translation
from vlmpipe.trainer.config.deepspeed_keys import (
    DECIDED_HERE,
    NODE_COPY,
    NOT_HERE,
    PASSED_ON,
    READ_UNDER,
    ignored_under,
    problem_in_section,
)

VERSION = "DeepSpeed 0.19"
PASSED = "train.deepspeed"
# Values of keys -> concepts. Others are passed on, decided elsewhere or without use: deepspeed_keys has them.
CONCEPTS = {
    "train_batch_size": "global_batch",
    "train_micro_batch_size_per_gpu": "micro_batch",
    "gradient_accumulation_steps": "accumulation",
    "zero_optimization.stage": "zero_stage",
    "zero_optimization.offload_optimizer.device": "offload_optimizer",
    "zero_optimization.offload_param.device": "offload_weights",
    "zero_optimization.cpu_offload": "offload_optimizer",
    "zero_optimization.cpu_offload_params": "offload_weights",
    "optimizer.type": "optimizer",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.betas": "betas",
    "scheduler.type": "schedule",
    "scheduler.params.warmup_num_steps": "warmup_steps",
    "scheduler.params.total_num_steps": "max_steps",
    "scheduler.params.warmup_max_lr": "peak_rate",
    "scheduler.params.cos_min_ratio": "final_rate",
    "fp16.enabled": "fp16",
    "bf16.enabled": "bf16",
    "bfloat16.enabled": "bf16",
    "gradient_clipping": "clip",
    "tensor_parallel.autotp_size": "tensor_parallel",
    "communication_data_type": "reduce_dtype",
    "data_types.grad_accum_dtype": "accumulation_dtype",
}
DIRECT = {
    "optimizer.params.weight_decay": "train.optimizer.weight_decay",
    "optimizer.params.eps": "train.optimizer.eps",
}
# Names of ZeRO's settings that DeepSpeed takes beside those with stage3_.
SHORT_NAMES = ("prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold",
               "max_live_parameters", "max_reuse_distance", "module_granularity_threshold")  # fmt: skip
DROPPED = {
    "fp16.loss_scale": "bf16 needs no loss scaling; with fp16 the scale is dynamic",
    "fp16.initial_scale_power": "bf16 needs no loss scaling; with fp16 the scale is dynamic",
    "fp16.loss_scale_window": "bf16 needs no loss scaling; with fp16 the scale is dynamic",
    "fp16.hysteresis": "bf16 needs no loss scaling; with fp16 the scale is dynamic",
    "fp16.consecutive_hysteresis": "bf16 needs no loss scaling; with fp16 the scale is dynamic",
    "fp16.min_loss_scale": "bf16 needs no loss scaling; with fp16 the scale is dynamic",
    "fp16.auto_cast": "train.precision decides the number types",
    "fp16.fp16_master_weights_and_grads": "train.precision decides the number types",
    "optimizer.params.torch_adam": "the trainer chooses the kernel of AdamW",
    "optimizer.params.adam_w_mode": "the optimizer is AdamW",
    "optimizer.params.bias_correction": "AdamW corrects the bias of its moments",
    "scheduler.params.warmup_min_lr": "the warm-up begins at 0",
    "scheduler.params.warmup_type": "the warm-up is linear",
    "scheduler.params.last_batch_iteration": "checkpoints hold the step",
    "zero_optimization.offload_optimizer.pin_memory": "offloaded state is always in pinned memory",
    "zero_optimization.offload_param.pin_memory": "offloaded state is always in pinned memory",
    "zero_optimization.offload_optimizer.nvme_path": "no state lies on a disk",
    "zero_optimization.offload_param.nvme_path": "no state lies on a disk",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": "the export is a whole model",
    "zero_optimization.gather_16bit_weights_on_model_save": "the export is a whole model",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": "the export is a whole model",
    "zero_allow_untested_optimizer": "the optimizer is AdamW",
}
# Sections whose values are dropped together.
DROPPED_SECTIONS = {
    "checkpoint": "checkpoints here are not DeepSpeed's own: every rank saves its shard, for any number of ranks",
    "zero_optimization.offload_optimizer": "it tunes copies that train.offload decides",
    "zero_optimization.offload_param": "it tunes copies that train.offload decides",
    "monitor_config": "metrics.jsonl has the curves",
    "activation_checkpointing": "train.activation_checkpointing recomputes layers, without DeepSpeed's partitions",
}
REFUSED_SECTIONS = {
    "pipeline": "train.strategy pp and train.pipeline_parallel split the language model's layers evenly by their FLOPs",
    "elasticity": "a run keeps its number of ranks; it resumes on another number",
    "autotuning": "vlmpipe plan --suggest looks for settings",
    "curriculum_learning": "data.phases changes the shares of sources by epoch",
    "compression_training": "weights are not pruned or quantized in training",
    "sparse_attention": "attention is dense within a sample",
}
DEFAULT_PEAK = 1e-3  # warmup_max_lr of DeepSpeed's WarmupLR and WarmupDecayLR
ONE_STEP_WARMUP = 1000  # of DeepSpeed's schedulers where warmup_num_steps is not given


def translate_deepspeed(translation: Translation, under: Path = (), *, is_whole: bool = True) -> Concepts:
    """Answer the keys of a configuration below `under`.

    is_whole: the file is the configuration, so that batch, schedule and precision are its own, and fields are set.
    Otherwise the concepts are those of a larger file, which translates them.
    """
    concepts = Concepts(translation, VERSION, {"betas": [0.9, 0.999]} if is_whole else {})
    for leaf in translation.ledger.below(under):
        if leaf != under:
            _answer(concepts, leaf, ".".join(map(str, leaf[len(under) :])))
    _clip(concepts)
    _communication(concepts)
    _scheduler(concepts)
    if is_whole:
        _assume_ranks(concepts)
        translate_training(concepts)
    return concepts


def _answer(concepts: Concepts, leaf: Path, name: str) -> None:
    translation, value = concepts.translation, concepts.translation.value(leaf)
    parents = [name.rsplit(".", count)[0] for count in range(name.count(".") + 1)]
    section = next((parent for parent in parents if parent in DROPPED_SECTIONS), "")
    refused = next((parent for parent in parents if parent in REFUSED_SECTIONS), "")
    if value == "auto":
        translation.drop(leaf, "transformers' Trainer fills in auto; the run file's own value holds")
    elif name in CONCEPTS:
        concepts.add(CONCEPTS[name], leaf, value)
    elif name in DIRECT:
        result = number(value)
        translation.express(leaf, DIRECT[name], result) if result is not None else translation.refuse(
            leaf, "it is no number"
        )
    elif name in ("optimizer.params.bias_correction", "optimizer.params.adam_w_mode") and not is_on(value):
        translation.refuse(leaf, "AdamW decouples the weight decay, and corrects the bias of its moments")
    elif name in DROPPED:
        translation.drop(leaf, DROPPED[name])
    elif name == "optimizer.params.freeze_step" or name == "amp.enabled":
        translation.refuse(leaf, "train.precision and train.optimizer decide it") if is_on(value) else translation.drop(
            leaf, "off, as here"
        )
    elif refused:
        translation.refuse(leaf, REFUSED_SECTIONS[refused])
    elif section:
        translation.drop(leaf, DROPPED_SECTIONS[section])
    elif name.rpartition(".")[2] in SHORT_NAMES and name.startswith("zero_optimization."):
        target = f"train.deepspeed.zero_optimization.stage3_{name.rpartition('.')[2]}"
        translation.change([leaf], target, value, f"{name.rpartition('.')[2]} there")
    elif name == NODE_COPY and value == 1:
        translation.drop(leaf, "1 is no second copy")
    elif name in PASSED_ON and name != "zero_optimization":
        translation.express(leaf, f"train.deepspeed.{name}", value)
    elif of := next(
        (parent for parent in parents if parent in PASSED_ON and "." not in parent and parent != "zero_optimization"),
        "",
    ):
        translation.express(leaf, f"train.deepspeed.{name}", value)
        assert of
    else:
        _not_passed(translation, leaf, name, parents)


def _not_passed(translation: Translation, leaf: Path, name: str, parents: list[str]) -> None:
    value = translation.value(leaf)
    if known := next((parent for parent in parents if parent in DECIDED_HERE), ""):
        reason = f"{DECIDED_HERE[known]} decides it"
    elif known := next((parent for parent in parents if parent in NOT_HERE), ""):
        reason = NOT_HERE[known]
    else:
        known_keys = dict.fromkeys((*PASSED_ON, *CONCEPTS, *DROPPED), "")
        translation.refuse(leaf, unknown(name, known_keys, "DeepSpeed"))
        return
    if is_on(value) and name.partition(".")[0] not in ("tensorboard", "csv_monitor", "wandb", "comet"):
        translation.refuse(leaf, reason)
    else:
        translation.drop(leaf, reason)


def drop_what_is_ignored(translation: Translation) -> None:
    """Take out keys that DeepSpeed does not read under the strategy of the run file, and wrong values that it takes."""
    strategy = translation.settings.get("train.strategy")
    for field in [name for name in translation.settings if name.startswith(f"{PASSED}.")]:
        name = field.removeprefix(f"{PASSED}.")
        of_section = name if name in READ_UNDER else name.partition(".")[0]
        if strategy and (why := ignored_under(of_section, str(strategy.value))):
            del translation.settings[field]
            translation.ledger.refuse_field(field, why, Outcome.DROPPED)
        elif problem := problem_in_section(name, translation.settings[field].value):
            del translation.settings[field]
            translation.ledger.refuse_field(field, problem)


def _clip(concepts: Concepts) -> None:
    translation, entry = concepts.translation, concepts.take("clip")
    value = concepts.number("clip")
    if entry and value is not None:
        translation.express(entry.path, "train.clip_grad_norm", value)
    elif concepts.defaults:
        translation.assume("train.clip_grad_norm", 0.0, "DeepSpeed clips nothing by default; 1.0 is usual")


def _communication(concepts: Concepts) -> None:
    translation = concepts.translation
    types = {"bf16": "bf16", "bfp16": "bf16", "bfloat16": "bf16", "fp32": "fp32", "float32": "fp32"}
    for concept, field in (
        ("reduce_dtype", "train.reduce_dtype"),
        ("accumulation_dtype", "train.gradient_accumulation_dtype"),
    ):
        if entry := concepts.take(concept):
            name = types.get(str(entry.value).lower())
            if name is None:
                translation.refuse(entry.path, f"{field} is fp32 or bf16")
            else:
                translation.change([entry.path], field, name, f"{entry.value} there")


def _scheduler(concepts: Concepts) -> None:
    """The peak of a schedule, and its warm-up where none is given."""
    translation, entry = concepts.translation, concepts.take("schedule")
    if peak := concepts.take("peak_rate"):
        rate, base = concepts.number("peak_rate"), concepts.take("learning_rate")
        if rate and base and number(base.value) not in (None, rate):
            reason = f"{path_text(peak.path)} {rate:g} is the schedule's peak, in place of the optimizer's {base.value}"
            concepts.entries.pop("learning_rate")
            translation.change([peak.path, base.path], "train.optimizer.learning_rate", rate, reason)
        elif rate and not base:
            concepts.entries["learning_rate"] = peak
        elif peak.value != "auto":
            translation.drop(peak.path, "the optimizer's learning rate, which is the peak")
    elif entry and str(entry.value).lower() in ("warmuplr", "warmupdecaylr"):
        rate, base = concepts.number("learning_rate"), concepts.take("learning_rate")
        if rate and base and rate != DEFAULT_PEAK:
            reason = f"the optimizer's; DeepSpeed's schedule would rise to {DEFAULT_PEAK:g} without warmup_max_lr"
            concepts.entries.pop("learning_rate")
            translation.change([base.path], "train.optimizer.learning_rate", rate, reason)
    if not concepts.defaults:
        return
    if entry is None:
        translation.assume("train.lr_schedule", "constant", "DeepSpeed has no schedule by default")
        if concepts.take("warmup_steps") is None:
            translation.assume("train.warmup_fraction", 0.0, "DeepSpeed has no warm-up without a schedule")
    elif concepts.take("warmup_steps") is None:
        translation.assume("train.warmup_steps", ONE_STEP_WARMUP, "the default of DeepSpeed's schedules")


def _assume_ranks(concepts: Concepts) -> None:
    """GPUs that a batch of this size is for: DeepSpeed asks for total = micro-batch x accumulation x GPUs."""
    parts = [concepts.take(name) for name in ("global_batch", "micro_batch", "accumulation")]
    values = [number(part.value) if part else None for part in parts]
    total, micro, accumulation = values
    gpus = int(total // (micro * (accumulation or 1))) if total and micro and accumulation else 0
    exact = gpus and micro and accumulation and micro * accumulation * gpus == total
    translation = concepts.translation
    from vlmpipe.importing.settings.sharding import translate_sharding

    if exact and 1 <= gpus <= 4096 and (gpus <= EXAMPLE_GPUS or gpus % EXAMPLE_GPUS == 0):
        assume_cluster(translation, gpus=gpus)
    else:
        assume_cluster(translation)
    translate_sharding(concepts)


def is_deepspeed(content: Mapping[str, object]) -> bool:
    """Return whether a mapping is a DeepSpeed configuration, by its keys."""
    keys = {"zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu", "fp16", "bf16", "optimizer"}
    marks = {"zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu"}
    sections = sum(
        isinstance(section := content.get(key), dict) and bool(section.keys() & {"enabled", "type"})
        for key in ("fp16", "bf16", "optimizer", "scheduler")
    )
    return bool(content.keys() & marks) or (bool(content.keys() & keys) and sections > 0)
