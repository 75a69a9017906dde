"""DeepSpeed's configuration, derived from the run file. Imports no torch: the planner reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vlmpipe.trainer.config.deepspeed_keys import NODE_COPY
from vlmpipe.trainer.config.train import TrainConfig

LARGEST_BUCKET_ELEMENTS = 500_000_000  # DeepSpeed's default
# Of two buckets, one of which is filled while the other is reduced: no more memory than one of the largest.
OVERLAPPED_BUCKET_ELEMENTS = LARGEST_BUCKET_ELEMENTS // 2
HPZ = NODE_COPY.rpartition(".")[2]
LIVE_LAYERS = 2  # that ZeRO-3 may hold gathered at a time


@dataclass(frozen=True)
class Sizes:
    """Numbers of parameters that decide bucket sizes."""

    trainable: int
    layer: int  # of the largest layer
    vector: int  # in the largest parameter of one dimension, a bias or a norm


def engine_settings(config: TrainConfig, *, stage: int, micro_steps: int, sizes: Sizes) -> dict[str, Any]:
    """DeepSpeed's configuration, without reliance on its defaults."""
    overlaps = not reduces_at_the_end(config) and overlaps_reduction(
        config.deepspeed, stage=stage, offload=config.offload, trainable=sizes.trainable
    )
    # Allocated in full even for small models.
    bucket_elements = min(bucket_limit(stage=stage, overlaps=overlaps), sizes.trainable)
    settings: dict[str, Any] = {
        # DeepSpeed counts each rank's sequences as its own.
        "train_batch_size": config.global_batch_size * config.context_parallel,
        "train_micro_batch_size_per_gpu": config.micro_batch_size,
        "gradient_accumulation_steps": micro_steps,
        "gradient_clipping": config.clip_grad_norm,  # DeepSpeed's default clips at 1.0
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": overlaps,
            "contiguous_gradients": True,
            "reduce_bucket_size": bucket_elements,
            "allgather_bucket_size": min(LARGEST_BUCKET_ELEMENTS, sizes.trainable),
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,  # our metrics are the log
        "wall_clock_breakdown": False,
    }
    if stage == 3:
        # The defaults are for billions of parameters: smaller models would be gathered once and never freed.
        settings["zero_optimization"] |= {
            "stage3_param_persistence_threshold": sizes.vector,  # up to this size not sharded
            "stage3_prefetch_bucket_size": sizes.layer,  # fetched ahead
            "stage3_max_reuse_distance": 0,  # free weights after each use
            "stage3_max_live_parameters": LIVE_LAYERS * sizes.layer,
            "memory_efficient_linear": False,  # it would replace torch's function in the whole process
        }
    match config.precision:
        case "bf16":
            settings |= {
                # Skipping a step is not for bf16, whose range is that of fp32. Without immediate_grad_update stage 1
                # would hold whole bf16 gradients beside their fp32 sums; other stages ignore it.
                "bf16": {"enabled": True, "check_grad_overflow": False, "immediate_grad_update": True},
                "data_types": {"grad_accum_dtype": config.gradient_accumulation_dtype},
                "communication_data_type": config.reduce_dtype,
            }
        case "bf16-autocast" | "fp16":
            dtype = "bfloat16" if config.precision == "bf16-autocast" else "float16"
            settings["torch_autocast"] = {"enabled": True, "dtype": dtype}
    return settings


def overlaps_reduction(deepspeed: Mapping[str, Any], *, stage: int, offload: str, trainable: int) -> bool:
    """Return whether DeepSpeed reduces gradients while the backward pass computes (`overlap_comm`). `deepspeed` is
    train.deepspeed, which may decide it.

    Stages 1 and 2 need several buckets for it: one that takes all gradients is reduced at the end. Not with offloading,
    where each gradient that is reduced is copied to the machine's memory at once.
    """
    settings = deepspeed.get("zero_optimization", {})
    if "overlap_comm" in settings:
        return bool(settings["overlap_comm"])
    if stage == 3:
        return True
    return offload == "none" and trainable > int(settings.get("reduce_bucket_size", OVERLAPPED_BUCKET_ELEMENTS))


def reduces_at_the_end(config: TrainConfig) -> bool:
    """Return whether ZeRO-1 is DeepSpeed's `BF16_Optimizer`, which has no `overlap_comm` and sums whole fp32
    gradients.
    """
    return config.strategy == "zero1" and config.precision == "bf16" and config.gradient_accumulation_dtype == "fp32"


def bucket_limit(*, stage: int, overlaps: bool) -> int:
    """Most numbers in a bucket. Stage 3 has one bucket in any case."""
    return OVERLAPPED_BUCKET_ELEMENTS if overlaps and stage < 3 else LARGEST_BUCKET_ELEMENTS


def requested_copy_ranks(config: TrainConfig) -> int:
    """Ranks that share a second copy of the weights (ZeRO++ hpZ) by train.deepspeed; 0 where it asks for none."""
    return int(config.deepspeed.get("zero_optimization", {}).get(HPZ, 0))


def node_copy_ranks(config: TrainConfig, *, nodes: int, node_ranks: int) -> int:
    """Ranks that do share a second copy, 0 for none: a single node has all weights, and DeepSpeed ignores groups of
    one.
    """
    ranks = requested_copy_ranks(config)
    return ranks if min(ranks, nodes, node_ranks) > 1 else 0


def with_node_copy(config: TrainConfig, ranks: int) -> dict[str, object]:
    """The content of train.deepspeed by which these ranks share a second copy of the weights; 0 for no copy."""
    zero = {name: value for name, value in config.deepspeed.get("zero_optimization", {}).items() if name != HPZ}
    zero |= {HPZ: ranks} if ranks else {}
    others: dict[str, object] = {name: value for name, value in config.deepspeed.items() if name != "zero_optimization"}
    return others | ({"zero_optimization": zero} if zero else {})


def laid_over(settings: Mapping[str, object], changes: Mapping[str, object]) -> dict[str, object]:
    """`settings` updated with `changes`, recursively."""
    merged = dict(settings)
    for name, value in changes.items():
        inner = merged.get(name)
        merged[name] = laid_over(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return merged


def offloading(config: TrainConfig, *, on_gpu: bool) -> dict[str, Any]:
    """Settings for offloading to host memory."""
    settings = {}
    if config.offload != "none":
        settings["offload_optimizer"] = {"device": "cpu", "pin_memory": on_gpu}
    if config.offload == "optimizer+weights":
        settings["offload_param"] = {"device": "cpu", "pin_memory": on_gpu}
    return settings
