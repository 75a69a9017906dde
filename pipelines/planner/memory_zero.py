"""What DeepSpeed's ZeRO holds at each moment of a step, beside weights, moments and activations.

Found by weighing every storage of real runs with DeepSpeed 0.19 (benchmarks/measure_memory.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipelines.planner.memory_parts import BF16_BYTES, FP32_BYTES, MemoryPart, split

if TYPE_CHECKING:
    from pipelines.planner.memory import Moment, Run

# DeepSpeed's reduce_bucket_size, which trainer/strategies/deepspeed.py bounds by the model.
BUCKET_ELEMENTS = 500_000_000
LIVE_LAYERS = 2  # stage3_max_live_parameters, as trainer/strategies/deepspeed.py sets it


def partitioned(run: Run, when: Moment, temporaries: MemoryPart) -> list[MemoryPart]:
    """ZeRO-1 and 2: an fp32 copy of the rank's partition, and buckets while gradients travel.

    Buckets are made when a backward pass has its first gradient, and go with it, when what they hold is reduced: at its
    end, where one bucket takes all gradients, and else whenever it is full. The partition's gradients exist from
    the end of the first backward pass on. ZeRO-1 sums whole gradients over micro-batches, and cuts them after the last
    one.
    """
    weights, layout = run.weights, run.layout
    share = FP32_BYTES * split(weights.trainable, layout.optimizer_shards)
    lasting = [MemoryPart("optimizer's weights", share, "the partition, fp32")]
    of_partition = MemoryPart("gradients", share, "fp32, the partition")
    summed = of_partition
    if run.offload != "none":
        lasting += [
            of_partition,
            MemoryPart("updated weights", share, "the partition, on its way back"),
            MemoryPart("largest gradient", 2 * FP32_BYTES * weights.largest, "of one parameter, on its way"),
        ]
        summed = MemoryPart("summed gradients", share, "the partition's, over micro-batches")
    if layout.gradient_shards == 1:
        summed = MemoryPart("whole gradients", FP32_BYTES * weights.trainable, "fp32, until the last micro-batch")
    elif run.passes > 1 and run.offload != "none":
        lasting.append(summed)
    if when == "step" and run.offload != "none":
        return [*lasting, temporaries]
    if when == "step":
        flat = MemoryPart("flat gradients", share, "the partition's, put together")
        return [*lasting, of_partition, flat, temporaries]
    types = 2 if run.precision != "fp32" and not weights.only_linear else 1
    # ZeRO-1's stay from the first micro-batch to the end of the last.
    there = when not in ("forward", "turn") or (layout.gradient_shards == 1 and run.passes > 1)
    size = types * FP32_BYTES * _bucket_elements(run) if there else 0
    parts = [*lasting, MemoryPart("buckets", size, "gradients on their way, fp32, one for each type")]
    if when == "rest" or (when in ("backward", "end") and weights.trainable > BUCKET_ELEMENTS):
        parts.append(MemoryPart("gradients on their way", _reduced_bytes(run), "a bucket's, copied for the reduction"))
    return [*parts, summed] if summed not in lasting and (run.passes > 1 or when in ("end", "rest")) else parts


def gathered(run: Run, when: Moment, temporaries: MemoryPart) -> list[MemoryPart]:
    """ZeRO-3: the partition once more for the optimizer, room for its gradients and one set of buckets from the start.

    Weights are gathered parameter by parameter, as far ahead as two layers; embedding and head are there whole where
    they are used, the embedding to the end of the backward pass. Of what is reduced there is a copy: after the backward
    pass where one bucket takes all gradients, and else whenever it is full.
    """
    weights, layout = run.weights, run.layout
    share = FP32_BYTES * split(weights.trainable, layout.optimizer_shards)
    lasting = [
        MemoryPart("optimizer's weights", share, "the partition, fp32"),
        MemoryPart("gradients", share, "fp32, the partition"),
        MemoryPart("buckets", _set_bytes(run), "gradients on their way, one for each type"),
    ]
    if run.offload != "none":
        lasting.append(MemoryPart("optimizer's gradients", share, "the partition's, for the update"))
    if when == "step" and run.offload != "none":
        return lasting
    if when == "step":
        return [*lasting, MemoryPart("flat gradients", share, "the partition's, put together"), temporaries]
    copies = 1 if run.on_gpu else 2  # on CPUs a reduce-scatter works on a copy of its own
    size = copies * (BF16_BYTES if run.precision != "fp32" else FP32_BYTES) * _bucket_elements(run)
    moving = MemoryPart("gradients on their way", size, "copied for the reduction")
    if when == "end" and reduces_once(run):
        embedding = MemoryPart("gathered weights", FP32_BYTES * weights.whole_embedding, "the embedding, whole")
        return [*lasting, moving, embedding]
    alone = {"forward": weights.whole_head, "turn": weights.whole_head, "end": weights.whole_embedding}.get(when, 0)
    live = min(max(LIVE_LAYERS * weights.whole_layer, alone), weights.trainable + weights.frozen)
    parts = [*lasting, MemoryPart("gathered weights", FP32_BYTES * live, "two layers, embedding or head, whole")]
    return parts if when in ("forward", "turn") or reduces_once(run) else [*parts, moving]


def reduces_once(run: Run) -> bool:
    """Whether ZeRO-3 reduces all gradients after the backward pass, when nothing of that is left."""
    return run.layout.strategy == "zero3" and run.weights.trainable <= BUCKET_ELEMENTS


def _bucket_elements(run: Run) -> int:
    return min(BUCKET_ELEMENTS, run.weights.trainable)


def _reduced_bytes(run: Run) -> int:
    """What DeepSpeed's `allreduce_bucket` copies of the largest bucket: its slices together in fp32, and under autocast
    in bf16, in which gradients of matrix products travel, the embedding's not."""
    if run.precision == "fp32":
        return FP32_BYTES * _bucket_elements(run)
    embedding = min(BUCKET_ELEMENTS, run.weights.embedding)
    products = min(BUCKET_ELEMENTS, run.weights.trainable - embedding)
    return max(FP32_BYTES * embedding, (FP32_BYTES + BF16_BYTES) * products)


def _set_bytes(run: Run) -> int:
    """ZeRO-3's buckets: under autocast gradients of linear layers travel in bf16, and in one of their own."""
    in_bf16 = run.precision != "fp32"
    each = (BF16_BYTES if in_bf16 else 0) + (0 if in_bf16 and run.weights.only_linear else FP32_BYTES)
    return each * _bucket_elements(run)
