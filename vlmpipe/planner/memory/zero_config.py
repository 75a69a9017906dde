"""Settings of a user's own DeepSpeed configuration (`train.deepspeed`) that change memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vlmpipe.trainer.sizing.deepspeed_config import HPZ, LARGEST_BUCKET_ELEMENTS, bucket_limit, overlaps_reduction

PRICED = frozenset(
    {
        "reduce_bucket_size",
        "overlap_comm",
        "contiguous_gradients",
        "stage3_max_live_parameters",
        "stage3_prefetch_bucket_size",
        "stage3_param_persistence_threshold",
        HPZ,
        "allgather_bucket_size",  # by 0: DeepSpeed 0.19 gathers into the weights themselves (`all_gather_dp_groups`)
    }
)


@dataclass(frozen=True)
class ZeroSettings:
    """DeepSpeed's `zero_optimization` settings, in parameters. None means the value that the trainer derives."""

    bucket_elements: int = LARGEST_BUCKET_ELEMENTS
    bucket_is_given: bool = False  # else it is bounded by what is trained
    buffers: int = 1  # of one bucket; 0 leaves gradients where they are until they are reduced
    live_elements: int | None = None  # gathered at a time by ZeRO-3
    prefetch_elements: int | None = None
    persistent_elements: int = 0  # that stay whole, where a user has set the threshold

    @classmethod
    def of(cls, deepspeed: Mapping[str, Any], *, strategy: str, offload: str, trainable: int) -> ZeroSettings:
        """Return a ZeRO strategy's settings. deepspeed: train.deepspeed. trainable: parameters that a rank trains."""
        zero, stage = deepspeed.get("zero_optimization", {}), int(strategy[-1])
        overlaps = overlaps_reduction(deepspeed, stage=stage, offload=offload, trainable=trainable)
        contiguous = zero.get("contiguous_gradients", True) or (offload != "none" and strategy != "zero3")
        # ZeRO-1 and 2 fill one while the other is reduced (`setup_buckets`); ZeRO-3 has one in any case.
        twice = contiguous and overlaps and stage < 3
        return cls(
            bucket_elements=int(zero.get("reduce_bucket_size", bucket_limit(stage=stage, overlaps=overlaps))),
            bucket_is_given="reduce_bucket_size" in zero,
            buffers=2 if twice else int(contiguous),
            live_elements=_number(zero, "stage3_max_live_parameters"),
            prefetch_elements=_number(zero, "stage3_prefetch_bucket_size"),
        )


def unpriced(deepspeed: Mapping[str, Any]) -> list[str]:
    """Keys of train.deepspeed that no figure of a plan considers."""
    names = [name for name in deepspeed if name != "zero_optimization"]
    inner = [f"zero_optimization.{name}" for name in deepspeed.get("zero_optimization", {}) if name not in PRICED]
    return sorted([*names, *inner])


def _number(settings: Mapping[str, Any], name: str) -> int | None:
    return int(settings[name]) if name in settings else None
