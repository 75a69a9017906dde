"""Weights, moments and gradients of pipeline stages, which FSDP shards over the copies of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vlmpipe.config.run_config import RunConfig
from vlmpipe.planner.memory.components import BF16_BYTES, FP32_BYTES, MemoryPart, average_parts, split
from vlmpipe.planner.memory.pipeline_partition import StageWeights
from vlmpipe.trainer.config.train import TrainConfig
from vlmpipe.trainer.sizing.pipeline_partition import Stage

ADAM_MOMENTS = 2  # fp32 each


def lasting_parts(weights: Sequence[StageWeights], shards: int, train: TrainConfig) -> list[MemoryPart]:
    """State of a rank with these stages, each sharded over `shards` replicas."""
    trained = sum(split(weight.trainable, shards) for weight in weights)
    frozen = sum(weight.frozen - (weight.sliced - weight.trainable) for weight in weights)
    frozen += sum(split(weight.sliced - weight.trainable, shards) for weight in weights)
    size, kind = (BF16_BYTES, "bf16") if train.has_bf16_weights else (FP32_BYTES, "fp32")
    return [
        MemoryPart("weights", FP32_BYTES * trained, "fp32, trained, sharded"),
        MemoryPart("frozen weights", size * frozen, f"{kind}, sharded where others of their part are trained"),
        MemoryPart("optimizer", ADAM_MOMENTS * FP32_BYTES * trained, "two moments in fp32"),
        *average_parts(trained, averaged=train.ema_decay > 0),
    ]


@dataclass(frozen=True)
class StageGroups:
    """Bytes of a stage's weights and gradients under FSDP, which gathers and reduces them group by group."""

    gathered_bytes: int  # in the compute type
    gathered_in_reduction_bytes: int  # when the first group's gradients are reduced
    whole_gradient_bytes: int
    sharded_bytes: int  # of gradients
    backward_bytes: int  # gradients of a micro-batch that are not yet added
    reduced_bytes: int  # of the largest group's gradients, copied for the reduction

    @classmethod
    def of(cls, config: RunConfig, stage: Stage, weights: StageWeights, shards: int, *, on_gpu: bool) -> StageGroups:
        train = config.train
        is_rounded = train.precision != "fp32"
        compute_bytes = BF16_BYTES if is_rounded else FP32_BYTES
        # The group outside of layers is reduced first; without one, a layer.
        group = weights.root or weights.layer
        sharded = weights.sliced_root if weights.root else weights.layer
        # The head's gradients are there from the beginning of a backward pass on. Computed again, a layer is fullest
        # after its last product.
        fresh = weights.root * stage.is_last + weights.last_product * (train.activation_checkpointing == "full")
        copied = FP32_BYTES * group
        if shards > 1 and not on_gpu:  # on CPUs a reduce-scatter works on a copy of its own
            copied += FP32_BYTES * split(group, shards)
        return cls(
            gathered_bytes=compute_bytes * weights.sliced,
            gathered_in_reduction_bytes=compute_bytes * (weights.sliced - sharded),
            whole_gradient_bytes=FP32_BYTES * weights.trainable,
            sharded_bytes=FP32_BYTES * split(weights.trainable, shards),
            backward_bytes=compute_bytes * fresh * is_rounded,
            reduced_bytes=copied,
        )
