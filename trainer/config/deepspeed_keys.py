"""Keys of DeepSpeed's configuration: those that a run file passes on, and what takes the place of the others."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from typing import Literal

DECIDED_HERE = {
    "train_batch_size": "train.global_batch_size",
    "train_micro_batch_size_per_gpu": "train.micro_batch_size",
    "gradient_accumulation_steps": "train.global_batch_size and micro_batch_size",
    "gradient_clipping": "train.clip_grad_norm",
    "optimizer": "train.optimizer",
    "scheduler": "train.lr_schedule",
    "fp16": "train.precision",
    "bf16": "train.precision",
    "bfloat16": "train.precision",
    "amp": "train.precision",
    "torch_autocast": "train.precision",
    "data_types": "train.gradient_accumulation_dtype",
    "communication_data_type": "train.reduce_dtype",
    "activation_checkpointing": "train.activation_checkpointing",
    "compile": "train.compile",
    "pipeline": "train.strategy pp and train.pipeline_parallel",
    "tensor_parallel": "train.strategy tp and train.tensor_parallel",
    "checkpoint": "section checkpoint, for checkpoints here are not DeepSpeed's own",
    "wandb": "train.wandb",
    "zero_allow_untested_optimizer": "train.optimizer",
    "zero_force_ds_cpu_optimizer": "train.optimizer",
    "zero_optimization.stage": "train.strategy",
    "zero_optimization.offload_optimizer": "train.offload",
    "zero_optimization.offload_param": "train.offload",
    "zero_optimization.cpu_offload": "train.offload",
    "zero_optimization.cpu_offload_param": "train.offload",
    "zero_optimization.cpu_offload_use_pin_memory": "train.offload",
}

# Ranks that share a second copy of ZeRO-3's weights (ZeRO++ hpZ), so that weights stay inside of them.
NODE_COPY = "zero_optimization.zero_hpz_partition_size"
Kind = Literal["switch", "count", "steps", "number", "share", "level", "section"]
LOG_LEVELS = ("debug", "info", "warning", "error", "critical")


def _zero(kind: Kind, names: str) -> dict[str, Kind]:
    return {f"zero_optimization.{name}": kind for name in names.split()}


# What DeepSpeed's engine obeys as this trainer uses it: how it communicates, and what it prints; and what each takes.
PASSED_ON: Mapping[str, Kind] = {
    "zero_optimization": "section",
    "prescale_gradients": "switch",
    "gradient_predivide_factor": "number",
    "aio": "section",
    "comms_logger": "section",
    "flops_profiler": "section",
    "timers": "section",
    "wall_clock_breakdown": "switch",
    "memory_breakdown": "switch",
    "steps_per_print": "steps",
    "dump_state": "switch",
    "log_level": "level",
    **_zero(
        "switch",
        "contiguous_gradients reduce_scatter use_multi_rank_bucket_allreduce allgather_partitions overlap_comm "
        "round_robin_gradients ignore_unused_parameters parameter_alignment log_trace_cache_warnings "
        "enable_sanity_checks stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential",
    ),
    **_zero(
        "count",
        "reduce_bucket_size allgather_bucket_size sub_group_size stage3_prefetch_bucket_size "
        "stage3_param_persistence_threshold stage3_model_persistence_threshold stage3_max_live_parameters "
        "stage3_max_reuse_distance stage3_module_granularity_threshold",
    ),
    NODE_COPY: "count",
}
EXPECTED: Mapping[Kind, str] = {
    "switch": "true or false",
    "count": "a whole number of at least 0",
    "steps": "a whole number of at least 1",
    "number": "a number above 0",
    "share": "a number of at least 0",
    "level": f"one of {', '.join(LOG_LEVELS)}",
    "section": "a mapping",
}

# What DeepSpeed knows and this trainer does not use, or cannot: why.
NOT_HERE = {
    "gradient_allreduce_op": "losses here are averaged over labels, which needs DeepSpeed's mean",
    "managed_gradient_accumulation": "steps are cut by the trainer",
    "sparse_gradients": "embeddings have dense gradients",
    "data_efficiency": "the order of samples is the run file's",
    "dataloader_drop_last": "batches come from prepared data, not from DeepSpeed's loader",
    "seq_parallel_communication_data_type": "DeepSpeed's sequence parallelism is not used",
    "use_data_before_expert_parallelism": "there are no expert groups",
    "expert_parallel": "there are no expert groups",
    "hybrid_engine": "it is for training by generated answers",
    "weight_quantization": "a quantized base is model.lora.quantize_base",
    "vocabulary_size": "it only warns",
    "disable_allgather": "DeepSpeed does not read it any more",
    "disable_python_gc": "the trainer collects garbage between steps",
    "datastates_ckpt": "checkpoints here are not DeepSpeed's own",
    "tensorboard": "metrics.jsonl has the curves",
    "csv_monitor": "metrics.jsonl has the curves",
    "comet": "metrics.jsonl has the curves",
    "autotuning": "vlmpipe plan --suggest looks for settings",
    "zero_optimization.compute_grad_norm": "clipping and metrics need the norm",
    "zero_optimization.load_from_fp32_weights": "checkpoints here are not DeepSpeed's own",
    "zero_optimization.elastic_checkpoint": "checkpoints here are not DeepSpeed's own",
    "zero_optimization.pipeline_loading_checkpoint": "checkpoints here are not DeepSpeed's own",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": "sync-checkpoint gathers the weights",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": "sync-checkpoint gathers the weights",
    "zero_optimization.zenflow": "it updates weights outside of the trainer's steps",
    "zero_optimization.legacy_stage1": "DeepSpeed does not have it any more",
    "zero_optimization.zero_quantized_weights": "the model that computes would be a rounded one",
    "zero_optimization.zero_quantized_gradients": "its kernel reads gradients of any type as fp16",
    "zero_optimization.zero_quantized_nontrainable_weights": "a quantized base is model.lora.quantize_base",
    "zero_optimization.memory_efficient_linear": "it would replace torch's function in the whole process",
    "zero_optimization.override_module_apply": "weights are made by the trainer",
    "zero_optimization.save_muon_momentum_buffer_in_memory": "Muon is not an optimizer here",
    "zero_optimization.leaf_module": "the trainer says which modules are gathered whole",
}

# Keys that DeepSpeed 0.19 reads under some stages alone -> those stages, and why.
# Source: engine.py, _configure_zero_optimizer.
READ_UNDER: Mapping[str, tuple[frozenset[str], str]] = {
    **dict.fromkeys(
        (
            *(name for name in PASSED_ON if name.startswith("zero_optimization.stage3_")),
            *_zero("switch", "log_trace_cache_warnings enable_sanity_checks"),
            "zero_optimization.sub_group_size",
            NODE_COPY,
        ),
        (frozenset({"zero3"}), "it is for ZeRO-3's weights"),
    ),
    **dict.fromkeys(
        _zero(
            "switch",
            "use_multi_rank_bucket_allreduce allgather_bucket_size ignore_unused_parameters round_robin_gradients "
            "parameter_alignment",
        ),
        (frozenset({"zero1", "zero2"}), "it is for the buffers of ZeRO-1 and 2"),
    ),
    "zero_optimization.allgather_partitions": (frozenset(), "DeepSpeed 0.19 does not use it"),
    "aio": (frozenset(), "it is for state on a disk, which train.offload does not have"),
}
# Values inside of sections that DeepSpeed takes unseen.
IN_SECTIONS: Mapping[str, Kind] = {
    "flops_profiler.enabled": "switch",
    "flops_profiler.detailed": "switch",
    "flops_profiler.profile_step": "steps",
    "flops_profiler.top_modules": "steps",
    "flops_profiler.recompute_fwd_factor": "share",
}


def ignored_under(name: str, strategy: str) -> str:
    """Say why DeepSpeed would not read a key under a strategy of ZeRO; empty where it does."""
    strategies, why = READ_UNDER.get(name, (None, ""))
    if strategies is None or strategy in strategies or not strategy.startswith("zero"):
        return ""
    return f"{why}, and {strategy} ignores it" if strategies else why


def problems_of_new_runs(deepspeed: Mapping[str, object], strategy: str) -> list[str]:
    """Keys and values without effect, all at once. Records of runs may have them, and are read and continued."""
    texts: list[str] = []
    for name in _flat(deepspeed):
        if why := ignored_under(name, strategy):
            strategies = " and ".join(sorted(READ_UNDER[name][0]))
            other = f", or use {strategies}" if strategies else ""
            texts.append(f"{name} would have no effect: {why}; take it out{other}")
    for name in IN_SECTIONS:
        section, _, key = name.partition(".")
        values = deepspeed.get(section)
        if isinstance(values, dict) and key in values and (problem := problem_in_section(name, values[key])):
            texts.append(problem)
    return texts


def problem_in_section(name: str, value: object) -> str:
    """Describe the problem of a value that DeepSpeed takes unseen; empty for nothing, and for other names."""
    kind = IN_SECTIONS.get(name)
    if kind is None or _is_of(kind, value):
        return ""
    return f"{name}: found {json.dumps(value, default=repr)}, expected {EXPECTED[kind]}"


def problems(deepspeed: Mapping[str, object], strategy: str) -> list[str]:
    """Problems of the keys of `train.deepspeed` and of the kinds of their values, all at once.

    What is left is judged by DeepSpeed's own classes (`vlmpipe.trainer.strategies.deepspeed.values`).
    """
    texts = [text for name, value in _flat(deepspeed).items() for text in _of_key(name, value)]
    if deepspeed and not strategy.startswith("zero"):
        texts.insert(0, f"does not apply to strategy {strategy}: take it out, or use zero1 to zero3")
    return texts


def without_problems(deepspeed: Mapping[str, object]) -> dict[str, object]:
    """The keys of `train.deepspeed` without problems of their own, to be judged further."""
    good = {name for name, value in _flat(deepspeed).items() if not list(_of_key(name, value))}
    return {
        name: {inner: item for inner, item in value.items() if f"{name}.{inner}" in good}
        if name == "zero_optimization" and isinstance(value, dict)
        else value
        for name, value in deepspeed.items()
        if name in good
    }


def _flat(deepspeed: Mapping[str, object]) -> dict[str, object]:
    """Keys with those of zero_optimization after it."""
    zero = deepspeed.get("zero_optimization")
    inner = zero if isinstance(zero, dict) else {}
    return {**deepspeed, **{f"zero_optimization.{name}": value for name, value in inner.items()}}


def _of_key(name: str, value: object) -> Iterator[str]:
    if name in DECIDED_HERE:
        yield f"{name} is decided by {DECIDED_HERE[name]}: set that, and take this out"
    elif name in NOT_HERE:
        yield f"{name} would have no effect, or a wrong one: {NOT_HERE[name]}; take it out"
    elif name not in PASSED_ON:
        near = difflib.get_close_matches(name, [*PASSED_ON, *DECIDED_HERE], n=1, cutoff=0.8)
        hint = f"; did you mean {near[0]}?" if near else "; take it out"
        yield f"{name} is not known to DeepSpeed, which would ignore it{hint}"
    elif value == "auto":
        yield f"{name}: found auto, which transformers' Trainer fills in; write the value, or take it out"
    elif not _is_of(PASSED_ON[name], value):
        yield f"{name}: found {json.dumps(value, default=repr)}, expected {EXPECTED[PASSED_ON[name]]}"


def _is_of(kind: Kind, value: object) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    match kind:
        case "switch":
            return isinstance(value, bool)
        case "count" | "steps":
            return is_number and float(value) >= (kind == "steps") and float(value).is_integer()  # type: ignore[arg-type]
        case "number" | "share":
            return is_number and (float(value) > 0 or (kind == "share" and value == 0))  # type: ignore[arg-type]
        case "level":
            return value in LOG_LEVELS
        case "section":
            return isinstance(value, dict)
