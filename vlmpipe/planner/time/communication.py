"""Communication of each strategy in one step: what ranks send (`transfers` has how long it takes).

Ranks are numbered as in a device mesh (pipeline, data, tensor): tensor-parallel neighbours share a node first.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from vlmpipe.planner.memory.pipeline_partition import StageWeights, by_rank
from vlmpipe.planner.parallel_layout import Layout
from vlmpipe.planner.time.transfers import RankGroup, Transfer
from vlmpipe.trainer.config.train_options import Checkpointing, Precision, ReshardAfterForward
from vlmpipe.trainer.sizing.model_shape import PARTS, ModelShape, Part
from vlmpipe.trainer.sizing.pipeline_partition import Stage, schedule_passes, stages_of

DDP_BUCKET_BYTES = 25 * 2**20  # torch's default

FP32_BYTES, BF16_BYTES = 4, 2


@dataclass(frozen=True)
class Work:
    """Computation of a rank in one step, as far as its traffic depends on it."""

    micro_steps: int  # forward and backward passes before an update
    micro_batch_size: int
    sequence_length: int
    precision: Precision
    activation_checkpointing: Checkpointing
    recomputes_tower: bool = False
    max_images_per_sequence: float = 0.0  # that the tower runs on in the step; none when features are cached
    sequence_label_tokens: float = 0.0
    bf16_weights: bool = False  # weights that compute are bf16, also at rest (train.has_bf16_weights)
    reduce_bytes: int = FP32_BYTES  # of one gradient on its way, with bf16_weights and where FSDP reduces
    rounds_gradients: bool = False
    sequence_parallel: bool = False
    reshard_after_forward: ReshardAfterForward = "auto"
    stages: tuple[Stage, ...] = ()  # of each rank of a pipeline; () takes all layers as equal and the ends as free

    @property
    def compute_bytes(self) -> int:
        """Return the bytes of one number in the compute precision."""
        return FP32_BYTES if self.precision == "fp32" else BF16_BYTES

    @property
    def recomputes(self) -> bool:
        return self.activation_checkpointing != "none"


@functools.lru_cache(4096)  # machines of a search differ in rates, not in what is sent
def traffic(layout: Layout, shape: ModelShape, work: Work) -> tuple[Transfer, ...]:
    """All traffic of one training step.

    What is sent is what `trainer/strategies` does; tests/integration/trainer/strategies/test_traffic.py counts it.
    DDP all-reduces fp32 gradients once a step, or half of their bytes where they are rounded.
    With bf16 weights (train.precision bf16) gradients travel in train.reduce_dtype and updated weights in bf16.
    ZeRO-2 does so after each micro-batch, matrices in the autocast type (DeepSpeed 0.19, stage_1_and_2.py,
    `reduce_ready_partitions_and_remove_grads`), and then gathers fp32 weights once. FSDP2 gathers the layers'
    weights in the compute type twice a micro-batch, those outside layers once (train.reshard_after_forward: all once
    or all twice), and reduce-scatters fp32 gradients after each; parts in which nothing is trained stay whole. Hybrid
    does so inside a node and all-reduces a shard's gradients across nodes once a step. ZeRO-1 sends its gradients once
    a step. ZeRO-3 gathers all weights, frozen ones too, for each forward and each backward pass; with a copy in each
    node (hpZ of ZeRO++, Wang et al. 2023, arXiv 2306.10209) it gathers trained weights over all ranks once a step, and
    else inside nodes. Ranks that split layers sum activations, see `_tensor_sums`, and once a step the gradients of
    what is whole of adapters. A pipeline's stages gather their weights and reduce-scatter their gradients once a step
    and sum their own activations; the one that sends most is given. Where patterns choose what is trained, these count
    layers that no gradient reaches as the others.
    """
    strategy = layout.strategy
    stage = _fullest_stage(layout, shape, work)
    transfers = list(_between_parts(layout, shape, work, stage))
    data = RankGroup(layout.replicas, layout.tensor_parallel, layout.ranks_per_node)
    fp32 = _trainable_bytes(layout, shape, lambda part: FP32_BYTES)
    reduced = fp32 * work.reduce_bytes / FP32_BYTES
    # DeepSpeed under autocast: what matrix products use travels in the compute type, an embedding's gradient does not.
    mixed = _trainable_bytes(layout, shape, lambda part: FP32_BYTES if part == "embedding" else work.compute_bytes)
    updated = fp32
    if work.bf16_weights:
        mixed, updated = reduced, fp32 * BF16_BYTES / FP32_BYTES

    def in_trained_layers(part: Part) -> bool:
        if part in ("tower", "tower_adapters"):  # else it has no backward pass
            return shape.trains_tower
        return part in ("language_layers", "adapters")

    in_layers = _sliced_bytes(layout, shape, lambda part: work.compute_bytes * in_trained_layers(part))
    in_tower = bool(shape.sliced["tower"] or shape.sliced["tower_adapters"])
    units = shape.language.layers + shape.tower.layers * in_tower + 2  # embedding and head
    passes = units * work.micro_steps
    outside_layers = max(0, shape.sliced["tower"] - shape.tower.layers * shape.tower.layer_parameters)
    in_layers -= work.compute_bytes * outside_layers
    match strategy:
        case "ddp":
            sent_bytes = fp32 * BF16_BYTES / FP32_BYTES if work.rounds_gradients else reduced
            transfers += data.collective("gradients", "all_reduce", sent_bytes, max(1.0, sent_bytes / DDP_BUCKET_BYTES))
        case "pp" | "tp+pp+dp":
            weights = _stage_weights(layout, shape, work, stage)
            transfers += data.collective(
                "weights", "all_gather", work.compute_bytes * weights.sliced, len(stage.layers)
            )
            transfers += data.collective(
                "gradients", "reduce_scatter", FP32_BYTES * weights.trainable, len(stage.layers)
            )
        case "zero1":
            transfers += data.collective("gradients", "all_reduce", mixed)
            transfers += data.collective("weights", "all_gather", updated)
        case "zero2":
            transfers += data.collective("gradients", "all_reduce", mixed * work.micro_steps, work.micro_steps)
            transfers += data.collective("weights", "all_gather", updated)
        case "zero3":
            # Frozen weights too, but for the tower's: with cached features it is not there, and else it is small.
            untrained = (shape.parameters[part] - shape.trained[part] for part in PARTS if part != "tower")
            frozen = sum(untrained) * work.compute_bytes
            gathered = _trainable_bytes(layout, shape, lambda part: work.compute_bytes)
            gathers = 2 * work.micro_steps
            if layout.copy_shards:
                # A node's copy is made when what was gathered first is let go of, and is lost in the update, but that
                # of frozen weights lasts.
                transfers += data.collective("weights", "all_gather", gathered)
                node = RankGroup(layout.copy_shards, 1, layout.ranks_per_node)
                inside = node.collective(
                    "weights", "all_gather", (gathers - 1) * gathered + gathers * frozen, 2 * passes
                )
                transfers += [replace(transfer, of_node=True) for transfer in inside]
            else:
                transfers += data.collective("weights", "all_gather", gathers * (gathered + frozen), 2 * passes)
            transfers += data.collective("gradients", "reduce_scatter", mixed * work.micro_steps, passes)
        case "fsdp" | "tp" | "hsdp":
            shards = RankGroup(layout.weight_shards, layout.tensor_parallel, layout.ranks_per_node)
            copies = RankGroup(
                layout.replicas // layout.weight_shards,
                layout.tensor_parallel * layout.weight_shards,
                layout.ranks_per_node,
            )
            compute = _sliced_bytes(layout, shape, lambda part: work.compute_bytes)
            again = {"auto": in_layers, "always": compute, "never": 0.0}[work.reshard_after_forward]
            transfers += shards.collective("weights", "all_gather", (compute + again) * work.micro_steps, 2 * passes)
            transfers += shards.collective("gradients", "reduce_scatter", reduced * work.micro_steps, passes)
            transfers += copies.collective("gradients", "all_reduce", reduced / layout.weight_shards)
        case _:
            raise KeyError(strategy)
    return tuple(transfers)


def pipeline_bubble(layout: Layout, micro_steps: int) -> float:
    """Share of a step in which a rank waits: (p - 1) / (m v + p - 1), with p ranks of v stages and m micro-batches.

    Source: Narayanan et al. 2021 (arXiv 2104.04473), sections 2.2.1 and 2.2.2, as a share of the whole step.
    """
    others = layout.pipeline_parallel - 1
    return others / (micro_steps * layout.virtual_stages + others)


def _trainable_bytes(layout: Layout, shape: ModelShape, bytes_of: Callable[[Part], float]) -> float:
    """Return the bytes of the trained parameters of one rank, without pipeline stages."""
    return sum(shape.trained_on_rank(part, layout.tensor_parallel) * bytes_of(part) for part in PARTS)


def _sliced_bytes(layout: Layout, shape: ModelShape, bytes_of: Callable[[Part], float]) -> float:
    """Return the bytes of all parameters that FSDP shards: trained ones, and frozen ones of the same part."""
    sliced = shape.sliced
    frozen = {part: sliced[part] - shape.trained[part] for part in PARTS if sliced[part]}
    return _trainable_bytes(layout, shape, bytes_of) + sum(
        shape.of_tensor_rank(part, count, layout.tensor_parallel) * bytes_of(part) for part, count in frozen.items()
    )


def _fullest_stage(layout: Layout, shape: ModelShape, work: Work) -> Stage:
    """The one whose ranks send most to each other."""

    def sent(stage: Stage) -> float:
        in_layers = _tensor_sums(shape, work, stage) + sum(_shared_layers(shape, work, stage)) / 2
        sums = work.micro_steps * in_layers if layout.tensor_parallel > 1 else 0.0
        weights = _stage_weights(layout, shape, work, stage)
        return sums + (FP32_BYTES * weights.trainable + work.compute_bytes * weights.sliced) * (layout.replicas > 1)

    cut = stages_of(shape.language.layers, layout.stages, None, image_layers=shape.image_layers)
    return max(work.stages or by_rank(cut, layout), key=sent)


def _replicated(layout: Layout, shape: ModelShape, work: Work, stage: Stage) -> float:
    """Trained parameters of a stage that tensor-parallel ranks hold whole
    (trainer/strategies/tensor_parallel/replicated_gradients.py)."""
    ranks = layout.tensor_parallel
    alone = _stage_weights(replace(layout, tensor_parallel=1), shape, work, stage).trainable
    return (ranks * _stage_weights(layout, shape, work, stage).trainable - alone) / (ranks - 1)


def _stage_weights(layout: Layout, shape: ModelShape, work: Work, stage: Stage) -> StageWeights:
    cached = not work.max_images_per_sequence
    return StageWeights.of(shape, stage, cached=cached, tensor_parallel=layout.tensor_parallel)


def _tensor_sums(shape: ModelShape, work: Work, stage: Stage) -> float:
    """Bytes that ranks which split the layers of a stage sum in a micro-batch
    (trainer/strategies/tensor_parallel/plan.py).

    A layer sums what attention and feed-forward part give, and backward the gradients of their inputs (Shoeybi et al.
    2019, arXiv 1909.08053), but for `_shared_layers`; of checkpointing see `_sums_again`. The embedding is summed
    forward, the head's inputs backward, and three numbers of each label for the loss. What FSDP leaves whole it does
    not cast either: without bf16 weights it computes in fp32.
    """

    def bytes_of(part: Part) -> int:
        return FP32_BYTES if part in shape.left_whole and not work.bf16_weights else work.compute_bytes

    tokens, labels = work.micro_batch_size * work.sequence_length, work.micro_batch_size * work.sequence_label_tokens
    layer_bytes = (2 + _sums_again(shape, work)) * bytes_of("language_layers") + 2 * work.compute_bytes
    language = (len(stage.layers) - _num_shared(shape, work, stage)) * layer_bytes
    embedding = bytes_of("embedding") * stage.is_first
    tower_bytes = (2 + work.recomputes_tower) * bytes_of("tower") + 2 * work.compute_bytes * shape.trains_tower
    tower_layers = shape.tower.layers * (stage.is_first and shape.shards_tower)
    tower = work.micro_batch_size * work.max_images_per_sequence * shape.tower_tokens * tower_layers * tower_bytes
    head = stage.is_last * labels * (shape.language.hidden * work.compute_bytes + 3 * FP32_BYTES)
    return tokens * shape.language.hidden * (language + embedding) + tower * shape.tower.hidden + head


def _sums_again(shape: ModelShape, work: Work) -> bool:
    """Return whether checkpointing sums again what attention gives; after the feed-forward part's last product nothing
    is needed. Selective checkpointing saves a sum with its product (trainer/strategies/tensor_parallel/rowwise.py), but
    not with an adapter's."""
    return bool(shape.adapters) if work.activation_checkpointing == "selective" else work.recomputes


def _num_shared(shape: ModelShape, work: Work, stage: Stage) -> int:
    """Layers whose tokens ranks share: not those after which a level of the tower is added (DeepStack)."""
    return sum(number >= shape.image_layers for number in stage.layers) if work.sequence_parallel else 0


def _shared_layers(shape: ModelShape, work: Work, stage: Stage) -> tuple[float, float]:
    """Bytes that ranks which share the tokens of layers reduce-scatter in a micro-batch, and that they all-gather.

    Each sum of a layer is one of both (trainer/strategies/tensor_parallel/sequence_parallel.py), of numbers that
    products take and give. Checkpointing gathers both inputs again, and may sum again (`_sums_again`). A stage's last
    output is gathered, and backward what its first layer takes.
    """
    layers = _num_shared(shape, work, stage)
    if not layers:
        return 0.0, 0.0
    left_fp32 = "language_layers" in shape.left_whole and not work.bf16_weights
    number_bytes = FP32_BYTES if left_fp32 else work.compute_bytes
    numbers = work.micro_batch_size * work.sequence_length * shape.language.hidden
    scattered = (4 + _sums_again(shape, work)) * number_bytes * layers
    gathered = ((4 + 2 * work.recomputes) * layers + 2) * number_bytes
    return numbers * scattered, numbers * gathered


def _exchanged(shape: ModelShape, work: Work, ranks: int) -> float:
    """Bytes that ranks which share sequences exchange in a micro-batch, each its part
    (trainer/models/attention/context_parallel.py).

    Queries, keys and values of each layer and the output of its attention, and backward their gradients; activation
    checkpointing exchanges those of the forward pass again. Key and value heads are repeated to a multiple of `ranks`.
    """
    language = shape.language
    heads = 2 * language.heads + 2 * math.lcm(language.kv_heads, ranks)
    passes = 2 + (work.activation_checkpointing != "none")
    numbers = work.micro_batch_size * work.sequence_length * heads * language.head_dim * language.layers
    left_fp32 = "language_layers" in shape.left_whole and not work.bf16_weights
    number_bytes = FP32_BYTES if left_fp32 else work.compute_bytes
    return passes * numbers * number_bytes / ranks


def _between_parts(layout: Layout, shape: ModelShape, work: Work, stage: Stage) -> Iterator[Transfer]:
    tensor = RankGroup(layout.tensor_parallel, 1, layout.ranks_per_node)
    sums = work.micro_steps * _tensor_sums(shape, work, stage)
    sums_in_layer = 4 + (work.activation_checkpointing == "full")
    calls = work.micro_steps * sums_in_layer * len(stage.layers)
    yield from tensor.collective("activations", "all_reduce", sums, calls)
    scattered, gathered = (work.micro_steps * sent for sent in _shared_layers(shape, work, stage))
    if scattered:
        yield from tensor.collective("activations", "reduce_scatter", scattered, calls)
        yield from tensor.collective("activations", "all_gather", gathered, calls)
    if tensor.size > 1:
        replicated = _replicated(layout, shape, work, stage) / layout.weight_shards
        yield from tensor.collective("gradients", "all_reduce", FP32_BYTES * replicated)
    if layout.context_parallel > 1:
        context = RankGroup(layout.context_parallel, 1, layout.ranks_per_node)
        exchanges = 4 * (2 + (work.activation_checkpointing != "none")) * shape.language.layers * work.micro_steps
        exchanged = work.micro_steps * _exchanged(shape, work, context.size)
        yield from context.all_to_all("activations", exchanged, exchanges)
    stages = layout.pipeline_parallel
    if stages > 1:
        # In the compute type, to the next stage forward and to the one before backward; the first of all has none
        # before it and the last none after it, and with two ranks each has one of these.
        hidden_bytes = work.micro_batch_size * work.sequence_length * shape.language.hidden * work.compute_bytes
        passes = schedule_passes(work.micro_steps, stages, layout.virtual_stages)
        payload = (2 * layout.virtual_stages - (stages == 2)) * hidden_bytes * passes
        stage_ranks = layout.tensor_parallel * layout.replicas
        if stage_ranks * stages <= layout.ranks_per_node:
            yield Transfer("activations", "send", "intra", payload, payload, 0.0)
        else:
            senders = min(stage_ranks, layout.ranks_per_node)
            yield Transfer("activations", "send", "inter", payload, payload, payload * senders)
