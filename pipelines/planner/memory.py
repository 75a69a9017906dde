"""Memory of one rank, by part, at the fullest moment of a training step.

Activations are traced from the real code (`activations.py`); weights, gradients and optimizer state are counted from
the model's shape; what a strategy adds was found by weighing every storage of real runs, to which
tests/integration/test_memory.py holds these numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pipelines.planner.activations import WEIGHT_COPIES, Activations
from pipelines.planner.layout import Layout
from trainer.models.shape import ModelShape

GIB = 2**30
FP32_BYTES, BF16_BYTES = 4, 2
ADAM_MOMENTS = 2  # fp32 each
FSDP_GATHERED_LAYERS = 2  # the one that computes and the one that is fetched ahead
ZERO_BUCKET_ELEMENTS = (
    500_000_000  # DeepSpeed's reduce_bucket_size, which trainer/strategies/deepspeed.py bounds by the model
)
# A GPU holds more than torch allocates. Not measured by this project (see docs/reference/planner.md):
CONTEXT_BYTES = 600 << 20  # CUDA context and the kernels of torch, outside of torch's own count
WORKSPACE_BYTES = 64 << 20  # cuBLAS
NCCL_BYTES = 1 << 30  # channel buffers of the communicators of one rank, where there are several ranks
FRAGMENTATION = 0.04  # of what comes and goes within a step


@dataclass(frozen=True)
class MemoryPart:
    """One part of the bar. `why` is a few words."""

    name: str
    bytes: int
    why: str = ""


@dataclass(frozen=True)
class Setting:
    """Other values of the run file, and the memory that they need."""

    change: dict[str, Any]
    total_bytes: int
    fits: bool


@dataclass(frozen=True)
class Memory:
    """The answer for one device."""

    device: str
    capacity_bytes: int
    parts: tuple[MemoryPart, ...]
    moment: str  # the fullest: forward, backward or step
    nearest: tuple[Setting, ...] = field(default=())

    @property
    def total_bytes(self) -> int:
        return sum(part.bytes for part in self.parts)

    @property
    def spare_bytes(self) -> int:
        return self.capacity_bytes - self.total_bytes

    @property
    def fits(self) -> bool:
        return self.spare_bytes >= 0

    @property
    def binding(self) -> str:
        """The largest part."""
        return max(self.parts, key=lambda part: part.bytes).name

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "device": self.device,
            "capacity_bytes": self.capacity_bytes,
            "total_bytes": self.total_bytes,
            "spare_bytes": self.spare_bytes,
            "fits": self.fits,
            "binding": self.binding,
            "moment": self.moment,
            "parts": [{"name": part.name, "bytes": part.bytes, "why": part.why} for part in self.parts],
            "nearest": [vars(setting) for setting in self.nearest],
        }


@dataclass(frozen=True)
class Weights:
    """Parameters on one rank, before data-parallel sharding: tensor and pipeline parallelism divide the model."""

    trainable: int
    frozen: int
    layer: int  # trainable ones of one language layer
    root: int  # trainable ones outside of layers

    @classmethod
    def of(cls, shape: ModelShape, layout: Layout, *, cached: bool) -> Weights:
        """The first pipeline stage, which has the embedding, the tower and the projector."""
        counts = dict(shape.parameters)
        if cached:
            counts["tower"] = 0
        per_rank = {}
        for part, count in counts.items():
            whole = part in ("tower", "projector")
            per_rank[part] = count if whole else count // layout.tensor_parallel
        per_rank["language_layers"] //= layout.pipeline_parallel
        if layout.pipeline_parallel > 1:
            per_rank["head"] = 0
        trainable = sum(count for part, count in per_rank.items() if part not in shape.frozen)
        layers = 0 if "language_layers" in shape.frozen else per_rank["language_layers"]
        layer = shape.language.layer_parameters // layout.tensor_parallel if layers else 0
        return cls(trainable, sum(per_rank.values()) - trainable, layer, max(0, trainable - layers))


@dataclass(frozen=True)
class _Run:
    weights: Weights
    layout: Layout
    precision: str
    passes: int
    checkpointing: bool


def training_parts(
    shape: ModelShape,
    layout: Layout,
    activations: Activations,
    *,
    cached: bool,
    precision: str,
    passes: int,
    checkpointing: bool,
) -> tuple[str, list[MemoryPart]]:
    """The fullest moment of a step and what is held then: all that torch allocates.

    Args:
        passes: micro-batches that are summed for one step.
        checkpointing: activations are computed again, so that the backward pass is fullest inside of a layer.
    """
    weights = Weights.of(shape, layout, cached=cached)
    static = [
        MemoryPart("weights", FP32_BYTES * _split(weights.trainable, layout.weight_shards), "fp32, trained"),
        MemoryPart("frozen weights", FP32_BYTES * weights.frozen, "fp32, whole on every rank"),
        MemoryPart(
            "optimizer",
            ADAM_MOMENTS * FP32_BYTES * _split(weights.trainable, layout.optimizer_shards),
            "two moments in fp32",
        ),
        MemoryPart("inputs", passes * activations.input_bytes, "tokens, labels and images of a step"),
    ]
    run = _Run(weights, layout, precision, passes, checkpointing)
    moments = {
        "forward": _moment(activations.forward, layout, _extra(run, "forward")),
        "backward": _moment(activations.backward, layout, _extra(run, "backward")),
        "backward, at its end": _moment(activations.backward_end, layout, _extra(run, "end")),
        "step": _extra(run, "step"),
    }
    moment, parts = max(moments.items(), key=lambda item: sum(part.bytes for part in item[1]))
    return moment, [part for part in [*static, *parts] if part.bytes]


def device_parts(parts: list[MemoryPart], layout: Layout) -> list[MemoryPart]:
    """What a GPU holds beside what torch allocates, and the margin for holes between allocations."""
    lasting = {"weights", "frozen weights", "optimizer", "gradients"}
    passing = sum(part.bytes for part in parts if part.name not in lasting)
    return [
        MemoryPart("CUDA context", CONTEXT_BYTES + WORKSPACE_BYTES, "assumed"),
        *([MemoryPart("NCCL", NCCL_BYTES, "assumed")] if layout.world_size > 1 else []),
        MemoryPart(
            "fragmentation", int(FRAGMENTATION * passing), f"assumed, {FRAGMENTATION:.0%} of what comes and goes"
        ),
    ]


def _extra(run: _Run, when: str) -> list[MemoryPart]:
    """Gradients and what the strategy needs at a moment: forward, backward (its start), end (of backward), step."""
    weights, layout = run.weights, run.layout
    mine = _split(weights.trainable, layout.gradient_shards)
    whole, compute_bytes = weights.trainable, BF16_BYTES if run.precision == "bf16" else FP32_BYTES
    temporaries = MemoryPart(
        "optimizer's temporaries", FP32_BYTES * _split(weights.trainable, layout.optimizer_shards), "one moment's root"
    )
    if layout.strategy in ("zero1", "zero2", "zero3"):
        return _zero(run, when, temporaries)
    if layout.weight_shards == 1:  # ddp, tensor, pipeline: gradients live in buckets that stay
        gradients = MemoryPart("gradients", FP32_BYTES * whole, "fp32, in the buckets of all-reduce")
        return [gradients, temporaries] if when == "step" else [gradients]
    sharded = MemoryPart("gradients", FP32_BYTES * mine, "fp32, sharded")
    if when == "step":
        return [sharded, temporaries]
    gathered = weights.root + FSDP_GATHERED_LAYERS * weights.layer
    parts = [MemoryPart("gathered weights", compute_bytes * gathered, "the rest and two layers, whole")]
    if when == "end" or (run.checkpointing and when == "backward"):
        moving = (compute_bytes + FP32_BYTES) * weights.layer
        parts.append(MemoryPart("gradients on their way", moving, "one layer's, and in fp32 that of the layer before"))
    # The first micro-batch of a step makes the shards; those after it add to them.
    return [*parts, sharded] if run.passes > 1 or when == "end" else parts


def _zero(run: _Run, when: str, temporaries: MemoryPart) -> list[MemoryPart]:
    """DeepSpeed 0.19: an fp32 copy of the rank's partition, buckets of which the old ones outlive the new, and the
    partition's gradients, which exist from the end of the first backward pass on."""
    weights, layout = run.weights, run.layout
    partition = _split(weights.trainable, layout.gradient_shards)
    copy = MemoryPart(
        "optimizer's weights", FP32_BYTES * _split(weights.trainable, layout.optimizer_shards), "the partition, fp32"
    )
    bucket_bytes = FP32_BYTES * min(ZERO_BUCKET_ELEMENTS, weights.trainable)
    buckets = MemoryPart(
        "buckets", (3 if run.precision == "bf16" else 2) * bucket_bytes, "gradients on their way, one set per dtype"
    )
    gradients = MemoryPart("gradients", FP32_BYTES * partition, "fp32, the partition")
    if when == "step":
        return [copy, MemoryPart("buckets", bucket_bytes, "kept"), gradients, temporaries]
    parts = [copy, buckets]
    if layout.weight_shards > 1:
        gathered = weights.root + FSDP_GATHERED_LAYERS * weights.layer
        parts.append(MemoryPart("gathered weights", FP32_BYTES * gathered, "the rest and two layers, whole"))
    if run.passes > 1 or when == "end":
        parts.append(gradients)
    return parts


def _moment(held: Mapping[str, int], layout: Layout, extra: list[MemoryPart]) -> list[MemoryPart]:
    """Traced bytes, divided where tensor and pipeline parallelism divide the language model."""
    names = {
        WEIGHT_COPIES: ("bf16 copies of weights", "made by autocast, kept to the end of the forward pass"),
        "vision": ("vision tokens", "projected features, and the tower where it runs"),
        "language": ("activations", "held for the backward pass"),
        "head": ("logits", "of label tokens only"),
        "backward": ("backward's temporaries", ""),
    }
    parts = []
    for category, (name, why) in names.items():
        share = layout.tensor_parallel if category in (WEIGHT_COPIES, "language", "head") else 1
        if category == WEIGHT_COPIES:
            share *= layout.pipeline_parallel
        # A pipeline's first stage holds as many micro-batches as there are stages, each of its share of the layers.
        parts.append(MemoryPart(name, held.get(category, 0) // share, why))
    return [*parts, *extra]


def _split(count: int, shards: int) -> int:
    return -(-count // shards)
