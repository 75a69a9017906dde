"""Memory that torch's allocator keeps beside memory in use: freed blocks, of which nothing else is made meanwhile.

Blocks of one CUDA stream are reused in that stream only, and FSDP allocates in three: what it gathers, what it reduces,
and the rest. So the allocator reserves the peak of each, although they come at different moments. It gives free blocks
back when an allocation fails, so they decide no fit; but giving back in each step is slow.
"""

from __future__ import annotations

from collections.abc import Collection

from vlmpipe.config.run_config import RunConfig
from vlmpipe.planner.memory.components import BF16_BYTES, FP32_BYTES, MemoryPart, Weights, split
from vlmpipe.planner.parallel_layout import SHARDED_BY_FSDP, Layout
from vlmpipe.planner.workload import is_cached
from vlmpipe.trainer.sizing.model_shape import ModelShape

TURN = "backward, before its first gradient"


def idle_parts(
    config: RunConfig, shape: ModelShape, layout: Layout, moment: str, held: Collection[MemoryPart]
) -> list[MemoryPart]:
    """Reserved and free at the fullest moment of a step, `moment`, in which `held` is in use; without pipelines.

    Read in torch/distributed/fsdp/_fully_shard (_fsdp_collectives.py, _fsdp_param_group.py) and held to published
    figures of reserved memory (`benchmarks.planner.published_runs`).
    """
    parts = []
    half = config.train.compute_type == "bf16"
    if layout.strategy in SHARDED_BY_FSDP and layout.weight_shards > 1:
        weights, compute_bytes = Weights.of(shape, layout, cached=is_cached(config)), BF16_BYTES if half else FP32_BYTES
        # The gathered weights outside of layers are copied out of a buffer that lives until the first layer's is there.
        gathered = (
            weights.sliced_root
            + split(weights.sliced_root, layout.weight_shards)
            + split(weights.sliced_layer, layout.weight_shards)
        )
        parts.append(MemoryPart("gathering", compute_bytes * gathered, "buffers of parameters outside of layers"))
        reduced = weights.root if any(part.name == "gradients" for part in held) else weights.trainable
        shard = FP32_BYTES * split(reduced, layout.gradient_shards)
        parts.append(MemoryPart("reduced gradients", shard, "made later in the step"))
    if half and moment == TURN:
        # bf16 logits are freed in front of their fp32 copy, and no later tensor of the loss fits into the hole.
        train, data = config.train, config.data
        labels = train.micro_batch_size * data.sequence_length // train.context_parallel
        at_once = min(labels, train.loss_chunk_tokens or labels)
        size = BF16_BYTES * at_once * split(shape.vocabulary, train.tensor_parallel)
        parts.append(MemoryPart("bf16 logits", size, "a hole in front of their fp32 copy"))
    return parts
