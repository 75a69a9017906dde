"""Buffers that DeepSpeed ZeRO allocates in each phase of a step.

Found by weighing every storage of real runs with DeepSpeed 0.19 (tests/support/trainer/measure_memory.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vlmpipe.planner.memory.components import BF16_BYTES, FP32_BYTES, MemoryPart, split
from vlmpipe.planner.memory.host import NODE_WEIGHTS
from vlmpipe.trainer.sizing.deepspeed_config import LIVE_LAYERS

if TYPE_CHECKING:
    from vlmpipe.planner.memory.components import Phase, Run


def partitioned(run: Run, when: Phase) -> list[MemoryPart]:
    """ZeRO-1 and 2: an fp32 copy of the rank's partition, and buckets while gradients travel.

    Buckets are made when a backward pass has its first gradient, and go with it, when what they hold is reduced: at its
    end, where one bucket takes all gradients, and else whenever it is full. The partition's gradients exist from
    the end of the first backward pass on. ZeRO-1 sums whole gradients over micro-batches, and cuts them after the last
    one.
    """
    if run.bf16_weights and run.sum_bytes == FP32_BYTES:
        return _in_bf16(run, when)
    weights, layout = run.weights, run.layout
    elements = split(weights.trainable, layout.optimizer_shards)
    lasting = [MemoryPart("optimizer's weights", FP32_BYTES * elements, "the partition, fp32")]
    of_partition = MemoryPart("gradients", run.module_bytes * elements, "the partition")
    summed = of_partition
    if run.offload != "none":
        of_partition = MemoryPart("gradients", FP32_BYTES * elements, "fp32, the partition")
        lasting += [
            of_partition,
            MemoryPart("updated weights", run.module_bytes * elements, "the partition, on its way back"),
            MemoryPart("largest gradient", 2 * run.module_bytes * weights.largest, "of one parameter, on its way"),
        ]
        summed = MemoryPart("summed gradients", run.module_bytes * elements, "the partition's, over micro-batches")
    if layout.strategy == "zero1":
        summed = MemoryPart("whole gradients", run.module_bytes * weights.trainable, "until the last micro-batch")
    elif run.passes > 1 and run.offload != "none":
        lasting.append(summed)
    if when == "step" and run.offload != "none":
        return lasting
    if when == "step":
        flat = MemoryPart("flat gradients", FP32_BYTES * elements, "the partition's, put together in fp32")
        return [*lasting, of_partition, flat]
    # ZeRO-1's stay from the first micro-batch to the end of the last.
    there = when not in ("forward", "turn") or (layout.strategy == "zero1" and run.passes > 1)
    parts = [*lasting, _buckets(run, when, there=there)]
    if when == "rest" or (when in ("backward", "end") and weights.trainable > run.zero.bucket_elements):
        parts.append(MemoryPart("gradients in flight", _reduced_bytes(run), "a bucket's, copied for the reduction"))
    return [*parts, summed] if summed not in lasting and (run.passes > 1 or when in ("end", "rest")) else parts


def _in_bf16(run: Run, when: Phase) -> list[MemoryPart]:
    """Return the parts with bf16 weights and fp32 gradient sums.

    ZeRO-2 adds what is reduced to the partition's sums, which the update reads in place. ZeRO-1 is an optimizer of its
    own (`bf16_optimizer.py`): whole fp32 sums from the start, copied together for the reduction.
    """
    weights, layout = run.weights, run.layout
    elements = split(weights.trainable, layout.optimizer_shards)
    lasting = [MemoryPart("optimizer's weights", FP32_BYTES * elements, "masters: the partition, fp32")]
    if layout.strategy == "zero1":
        whole = FP32_BYTES * weights.trainable
        parts = [*lasting, MemoryPart("gradients", whole, "fp32, whole")]
        copied = MemoryPart("gradients in flight", whole, "copied for the reduction")
        return [*parts, copied] if when == "rest" else parts
    sums = MemoryPart("gradients", FP32_BYTES * elements, "fp32, the partition's sums")
    if when == "step":
        return [*lasting, sums]
    early = when in ("backward", "end") and weights.trainable > run.zero.bucket_elements
    parts = [*lasting, _buckets(run, when, there=when not in ("forward", "turn"))]
    if when == "rest" or early:
        parts.append(MemoryPart("gradients in flight", _reduced_bytes(run), "a bucket's, copied for the reduction"))
    return [*parts, sums] if early or run.passes > 1 or when in ("end", "rest") else parts


def _buckets(run: Run, when: Phase, *, there: bool) -> MemoryPart:
    """Within the backward pass there are few gradients yet. Those of ZeRO-1 in place are its whole gradients."""
    types = 2 if run.precision != "fp32" and not run.bf16_weights and not run.weights.only_linear else 1
    size = types * run.zero.buffers * run.module_bytes * _allocated(run)
    if not run.zero.buffers and when != "backward" and run.layout.strategy != "zero1":
        size = run.module_bytes * _bucket_elements(run)
    why = "gradients in flight, one for each type" if run.zero.buffers else "gradients, until they are reduced"
    return MemoryPart("buckets", size if there else 0, why)


def gathered(run: Run, when: Phase) -> list[MemoryPart]:
    """ZeRO-3: the partition once more for the optimizer, room for its gradients and one set of buckets from the start.

    Weights are gathered parameter by parameter, as far ahead as two layers; embedding and head are there whole where
    they are used, the embedding to the end of the backward pass. Of what is reduced there is a copy: after the backward
    pass where one bucket takes all gradients, and else whenever it is full.
    """
    weights, layout = run.weights, run.layout
    share = FP32_BYTES * split(weights.trainable, layout.optimizer_shards)
    lasting = [
        MemoryPart("optimizer's weights", share, "the partition, fp32"),
        MemoryPart("gradients", run.sum_bytes * split(weights.trainable, layout.optimizer_shards), "the partition"),
        MemoryPart("buckets", _set_bytes(run), "gradients in flight, one for each type"),
    ]
    if layout.copy_shards:
        copied = run.module_bytes * split(weights.trainable + weights.frozen, layout.copy_shards)
        lasting.append(MemoryPart(NODE_WEIGHTS, copied, "all of them, over a node's ranks"))
    if run.zero.persistent_elements:
        whole = run.module_bytes * run.zero.persistent_elements
        lasting.append(MemoryPart("persistent weights", whole, "whole, by train.deepspeed's threshold"))
    if run.offload != "none":
        lasting.append(MemoryPart("optimizer's gradients", share, "the partition's, for the update"))
    if when == "step" and run.offload != "none":
        return lasting
    if when == "step":
        return [*lasting, MemoryPart("flat gradients", share, "the partition's, put together")]
    copies = 1 if run.on_gpu else 2  # on CPUs a reduce-scatter works on a copy of its own
    size = copies * (BF16_BYTES if run.precision != "fp32" else FP32_BYTES) * _bucket_elements(run)
    if run.bf16_weights:
        converted = run.sum_bytes if run.sum_bytes != run.reduce_bytes else 0
        size = (copies * run.reduce_bytes + converted) * _bucket_elements(run)
    moving = MemoryPart("gradients in flight", size, "copied for the reduction")
    if when == "end" and reduces_once(run):
        embedding = MemoryPart("gathered weights", run.module_bytes * weights.whole_embedding, "the embedding, whole")
        return [*lasting, moving, embedding]
    alone = {"forward": weights.whole_head, "turn": weights.whole_head, "end": weights.whole_embedding}.get(when, 0)
    live = min(max(_live(run), alone), weights.trainable + weights.frozen - run.zero.persistent_elements)
    parts = [
        *lasting,
        MemoryPart("gathered weights", run.module_bytes * live, "two layers, embedding or head, whole"),
        MemoryPart("prefetched weights", run.module_bytes * _fetched_together(run), "gathered into one tensor first"),
    ]
    return parts if when in ("forward", "turn") or reduces_once(run) else [*parts, moving]


def reduces_once(run: Run) -> bool:
    """Return whether ZeRO-3 reduces all gradients after the backward pass, when nothing of that is left."""
    return run.layout.strategy == "zero3" and run.weights.trainable <= run.zero.bucket_elements


def _live(run: Run) -> int:
    """Parameters that ZeRO-3 may have gathered at a time, beside one that is larger than that."""
    zero, weights = run.zero, run.weights
    most = LIVE_LAYERS * weights.whole_layer if zero.live_elements is None else zero.live_elements
    if zero.prefetch_elements is None:
        return most
    return min(most, LIVE_LAYERS * zero.prefetch_elements + weights.last_product)  # one bucket is used, one comes


def _fetched_together(run: Run) -> int:
    """Return the parameters by which a prefetch bucket that the user has set exceeds one gathered layer."""
    weights = run.weights
    fetched = min(run.zero.prefetch_elements or 0, _live(run), weights.trainable + weights.frozen)
    return max(0, fetched - weights.whole_layer)


def _bucket_elements(run: Run) -> int:
    """Most numbers that are reduced together: a parameter that is larger than a bucket goes alone."""
    return min(max(run.zero.bucket_elements, run.weights.largest), run.weights.trainable)


def _allocated(run: Run) -> int:
    """Numbers that a bucket has room for."""
    return (
        run.zero.bucket_elements if run.zero.bucket_is_given else min(run.zero.bucket_elements, run.weights.trainable)
    )


def _reduced_bytes(run: Run) -> int:
    """Bytes that DeepSpeed's `allreduce_bucket` copies of the largest bucket: its slices together in fp32, and under
    autocast in bf16, in which gradients of matrix products travel, the embedding's not."""
    if run.precision == "fp32":
        return FP32_BYTES * _bucket_elements(run)
    if run.bf16_weights:  # joined in bf16, and once more in the type that travels
        return (BF16_BYTES + run.reduce_bytes * (run.reduce_bytes != BF16_BYTES)) * _bucket_elements(run)
    embedding = min(_bucket_elements(run), run.weights.embedding)
    products = min(_bucket_elements(run), run.weights.trainable - embedding)
    return max(FP32_BYTES * embedding, (FP32_BYTES + BF16_BYTES) * products)


def _set_bytes(run: Run) -> int:
    """ZeRO-3's buckets: under autocast gradients of linear layers travel in bf16, and in one of their own."""
    if run.bf16_weights:  # made in the type that travels
        return run.reduce_bytes * _allocated(run) if run.zero.buffers else 0
    in_bf16 = run.precision != "fp32"
    element_bytes = (BF16_BYTES if in_bf16 else 0) + (0 if in_bf16 and run.weights.only_linear else FP32_BYTES)
    return element_bytes * _allocated(run) if run.zero.buffers else 0
