"""Sizes of what PowerSGD sends and keeps, from the shapes of gradients."""

from __future__ import annotations

from collections.abc import Mapping

from vlmpipe.planner.memory.components import FP32_BYTES, MemoryPart
from vlmpipe.planner.memory.host import ERRORS
from vlmpipe.trainer.sizing.ddp_gradients import bucket_bytes, factors_numbers, factors_rank
from vlmpipe.trainer.sizing.model_shape import ModelShape

FACTORS = "low-rank factors"


def numbers_in_factors(shape: ModelShape, rank: int) -> int:
    """Of all matrices that factors of `rank` stand for."""
    return sum(
        one.count * factors_numbers(one.rows, one.columns, factors_rank(one.rows, one.columns, rank))
        for one in shape.trained_matrices
    )


def numbers_sent(shape: ModelShape, rank: int) -> int:
    """That ranks sum in a step: factors, and what travels as it is."""
    replaced = sum(
        one.count * one.rows * one.columns
        for one in shape.trained_matrices
        if factors_rank(one.rows, one.columns, rank)
    )
    return shape.trainable_parameters - replaced + numbers_in_factors(shape, rank)


def lasting_parts(shape: ModelShape, rank: int) -> list[MemoryPart]:
    """What the hook of one rank keeps from step to step."""
    trained, factors = shape.trainable_parameters, numbers_in_factors(shape, rank)
    return [
        MemoryPart(ERRORS, FP32_BYTES * trained, "fp32, what PowerSGD has left out so far"),
        MemoryPart(FACTORS, FP32_BYTES * factors, f"fp32, of rank {rank}"),
    ]


def moving_parts(shape: ModelShape, held: Mapping[str, Mapping[str, int]], *, reducers: bool) -> dict[str, MemoryPart]:
    """While a bucket is approximated: a copy of it, and its new error beside the one that was. By moment, beyond the
    temporaries `held` then, by category, which the bucket's last gradient came from: they are gone.

    A large head makes a bucket by itself, the first one. The others are taken to be as large as the largest matrix and
    what DDP fills a bucket with, and the largest of them to come at the end. `reducers`: of a Reduction Server.
    """
    first, others = (size // FP32_BYTES for size in bucket_bytes(reducers=reducers))  # the last gradient may go beyond
    head = 0 if shape.tied_head else shape.trained["head"]
    head = head if head >= first else 0
    largest = max((one.rows * one.columns for one in shape.trained_matrices), default=0)
    buckets = {"backward": head, "end": min(largest + others, shape.trainable_parameters - head)}
    parts = {}
    for moment, numbers in buckets.items():
        gone = held[moment].get("backward", 0) + held[moment].get("head", 0)
        more = max(0, 2 * FP32_BYTES * numbers - gone)
        parts[moment] = MemoryPart("gradients on their way", more, "of one bucket: a copy, and its new error")
    return parts
