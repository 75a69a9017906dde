"""DeepSpeed's configuration, derived from the run file. No torch here: planners read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainer.config.train import TrainConfig

if TYPE_CHECKING:
    pass

LARGEST_BUCKET_ELEMENTS = 500_000_000  # DeepSpeed's default
LIVE_LAYERS = 2  # that ZeRO-3 may have gathered at a time


@dataclass(frozen=True)
class Sizes:
    """Numbers of parameters that decide how the engine gathers and reduces."""

    trainable: int
    layer: int  # of the largest layer
    vector: int  # of the largest parameter of one dimension: a bias or a norm


def engine_settings(config: TrainConfig, *, stage: int, micro_steps: int, sizes: Sizes) -> dict[str, Any]:
    """DeepSpeed's configuration. Every value that its defaults would set behind our back is named."""
    bucket_elements = min(LARGEST_BUCKET_ELEMENTS, sizes.trainable)  # allocated whole, however small the model is
    settings: dict[str, Any] = {
        "train_batch_size": config.global_batch_size,
        "train_micro_batch_size_per_gpu": config.micro_batch_size,
        "gradient_accumulation_steps": micro_steps,
        "gradient_clipping": config.clip_grad_norm,  # left out, DeepSpeed clips at 1.0
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": False,
            "contiguous_gradients": True,
            "reduce_bucket_size": bucket_elements,
            "allgather_bucket_size": bucket_elements,
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,  # our metrics are the log
        "wall_clock_breakdown": False,
    }
    if stage == 3:
        # The defaults are for models of billions: a smaller one would be gathered and never let go of.
        settings["zero_optimization"] |= {
            "stage3_param_persistence_threshold": sizes.vector,  # such stay whole: not worth a collective
            "stage3_prefetch_bucket_size": sizes.layer,  # fetched ahead
            "stage3_max_reuse_distance": 0,  # what is needed again only later is let go of
            "stage3_max_live_parameters": LIVE_LAYERS * sizes.layer,
            "memory_efficient_linear": False,  # replaces torch's function in the whole process; ours stays in the model
        }
    for name in config.quantized:  # left out otherwise: DeepSpeed would build its kernels
        settings["zero_optimization"][name] = True
    if config.precision != "fp32":
        # fp32 weights under autocast: ZeRO's own bf16 mode rounds the weights and drifts ten times further.
        settings["torch_autocast"] = {
            "enabled": True,
            "dtype": {"bf16": "bfloat16", "fp16": "float16"}[config.precision],
        }
    return settings


def node_weights(config: TrainConfig, *, nodes: int, node_ranks: int) -> dict[str, Any]:
    """A copy of the weights in each of `nodes`, over its `node_ranks`, for DeepSpeed's configuration.

    DeepSpeed makes groups of so many ranks as they are numbered, which are those of a node.
    """
    if not config.zero_hpz or not uses_hpz(nodes=nodes, node_ranks=node_ranks):
        return {}
    return {"zero_hpz_partition_size": node_ranks}


def uses_hpz(*, nodes: int, node_ranks: int) -> bool:
    """Whether `train.zero_hpz` means something: one node has all weights anyhow, and DeepSpeed takes one rank
    a node for none."""
    return nodes > 1 and node_ranks > 1


def laid_over(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`settings` with `changes`, mappings in them key by key."""
    found = dict(settings)
    for name, value in changes.items():
        inner = found.get(name)
        found[name] = laid_over(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return found


def offloading(config: TrainConfig, *, on_gpu: bool) -> dict[str, Any]:
    """What is kept in the machine's memory, for DeepSpeed's configuration: also what then lies on a disk (decision
    0046), which cannot be pinned."""
    place = {"device": "cpu", "pin_memory": on_gpu}
    optimizer = {"device": "cpu", "pin_memory": on_gpu and not config.nvme_path}
    found = {} if config.offload == "none" else {"offload_optimizer": optimizer}
    return {**found, "offload_param": place} if config.offload == "optimizer+weights" else found
