"""Memory of one rank, by component, at the peak phase of a training step.

Activations are traced from the real code (`activations.py`); weights, gradients and optimizer state are counted from
the model's shape; what a strategy adds was found by weighing every storage of real runs, to which
tests/integration/vlmpipe/planner/test_memory.py holds these numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from vlmpipe.planner.memory.activations import WEIGHT_COPIES, Activations
from vlmpipe.planner.memory.components import (
    BF16_BYTES,
    FP32_BYTES,
    Gathering,
    MemoryPart,
    Phase,
    Run,
    Setting,
    Weights,
    average_parts,
    split,
)
from vlmpipe.planner.memory.host import ACTIVATIONS, HostMemory, placed
from vlmpipe.planner.memory.reserved import TURN
from vlmpipe.planner.memory.zero import gathered, partitioned, reduces_once
from vlmpipe.planner.memory.zero_config import ZeroSettings
from vlmpipe.planner.parallel_layout import SHARDED_BY_FSDP, Layout
from vlmpipe.trainer.sizing.model_shape import ModelShape
from vlmpipe.trainer.sizing.optimizer_state import BYTES_8_BIT

GIB = 2**30
ADAM_MOMENTS = 2  # fp32 each
QUANTIZED = "4-bit weights"
# A GPU holds more than a step's tensors. Measured on one H200 (benchmarks/results/2026-11-26-h200.md): CUDA's context,
# kernels of torch and NCCL's communicator of one rank, outside of torch's count; and cuBLAS's workspaces, in it.
# The rest is assumed.
CONTEXT_BYTES = 753 << 20
WORKSPACE_BYTES = 64 << 20
# By how much a plan may exceed the device and still be tried: on an H200 17 of 19 plans were within 2 % of the peak
# (benchmarks/results/2026-11-26-h200.md).
NEAR = 0.02
LITTLE_SPARE = 0.05  # of the device; the estimate's own error is of this size
NCCL_BYTES = 1 << 30  # channel buffers of the communicators of one rank, where there are several ranks
FRAGMENTATION = 0.04  # of transient memory within a step
BESIDE_TORCH = ("CUDA context", "NCCL", "fragmentation")  # the last is a margin, for holes that no model foresees


@dataclass(frozen=True)
class Memory:
    """The answer for one device."""

    device: str
    capacity_bytes: int
    parts: tuple[MemoryPart, ...]
    moment: str  # the fullest: forward, backward or step
    nearest: tuple[Setting, ...] = field(default=())
    host: HostMemory | None = None  # of the fullest node; None without GPUs
    start: HostMemory | None = None  # of a node before the first step; None without GPUs
    idle: tuple[MemoryPart, ...] = ()  # what torch's allocator reserves beside what is in use

    @property
    def idle_bytes(self) -> int:
        return sum(part.bytes for part in self.idle)

    @property
    def reserved_bytes(self) -> int:
        """Memory that torch reserves (torch.cuda.max_memory_reserved): without the context and NCCL."""
        return self.idle_bytes + sum(part.bytes for part in self.parts if part.name not in BESIDE_TORCH)

    @property
    def returns_memory(self) -> bool:
        """Return whether the rank fits only because the allocator gives cached memory back in each step."""
        margin = sum(part.bytes for part in self.parts if part.name == "fragmentation")
        return self.fits and self.total_bytes - margin + self.idle_bytes > self.capacity_bytes

    @property
    def total_bytes(self) -> int:
        return sum(part.bytes for part in self.parts)

    @property
    def spare_bytes(self) -> int:
        return self.capacity_bytes - self.total_bytes

    @property
    def fits(self) -> bool:
        return self.spare_bytes >= 0 and all(host.fits for host in (self.host, self.start) if host)

    @property
    def is_near(self) -> bool:
        """Return whether the rank takes more memory than there is, by no more than the estimate's own error."""
        return -NEAR * self.capacity_bytes <= self.spare_bytes < 0

    @property
    def binding(self) -> str:
        """The largest part."""
        return max(self.parts, key=lambda part: part.bytes).name

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {
            "device": self.device,
            "capacity_bytes": self.capacity_bytes,
            "total_bytes": self.total_bytes,
            "spare_bytes": self.spare_bytes,
            "idle_bytes": self.idle_bytes,
            "fits": self.fits,
            "is_near": self.is_near,
            "binding": self.binding,
            "moment": self.moment,
            "parts": [part.as_dict() for part in self.parts],
            "nearest": [vars(setting) for setting in self.nearest],
            "host": self.host.as_dict() if self.host else None,
            "start": self.start.as_dict() if self.start else None,
        }


def training_phases(
    shape: ModelShape,
    layout: Layout,
    activations: Activations,
    *,
    cached: bool,
    precision: str,
    bf16_weights: bool = False,
    reduce_bytes: int = FP32_BYTES,
    sum_bytes: int = FP32_BYTES,
    passes: int,
    checkpointing: bool,
    recomputing: bool = True,
    on_gpu: bool = True,
    offload: str = "none",
    rounded: bool = False,
    averaged: bool = False,
    in_8_bits: int = 0,
    deepspeed: Mapping[str, object] | None = None,
    persistent: int = 0,
    gathering: Gathering = Gathering(),  # noqa: B008  # frozen
) -> dict[str, list[MemoryPart]]:
    """All that torch allocates at four moments of a step: forward pass, backward pass, its end, and update.

    Args:
        bf16_weights, reduce_bytes, sum_bytes: see `Run`.
        passes: micro-batches that are summed for one step.
        checkpointing: activations are computed again, so that the backward pass is fullest inside of a layer.
        recomputing: so are some of them.
        rounded: gradients travel in two bytes a number.
        deepspeed: train.deepspeed, what a user has laid over the engine's configuration.
        persistent: weights that ZeRO-3 keeps whole, by a threshold that a user has set.
        averaged: a moving average of the weights is kept, where the optimizer has its state.
        in_8_bits: trained parameters whose moments are stored in 8 bits.
        gathering: how FSDP gathers weights.
    """
    weights = Weights.of(shape, layout, cached=cached)
    in_bf16 = bf16_weights and layout.strategy.startswith("zero")  # whose masters are the optimizer's weights
    weight_bytes, weight_type = (BF16_BYTES, "bf16") if in_bf16 else (FP32_BYTES, "fp32")
    static = [
        MemoryPart("weights", weight_bytes * split(weights.trainable, layout.weight_shards), f"{weight_type}, trained"),
        _frozen(weights, layout, bf16=bf16_weights),
        MemoryPart(QUANTIZED, weights.quantized_bytes, "NF4, whole on every rank"),
        _moments(weights, layout, in_8_bits),
        *average_parts(split(weights.trainable, layout.optimizer_shards), averaged=averaged),
        MemoryPart("inputs", passes * activations.input_bytes, "tokens, labels and images of a step"),
    ]
    zero = ZeroSettings()
    if layout.strategy.startswith("zero"):
        zero = ZeroSettings.of(deepspeed or {}, strategy=layout.strategy, offload=offload, trainable=weights.trainable)
        zero = replace(zero, persistent_elements=persistent)
    run = Run(
        weights,
        layout,
        precision,
        bf16_weights,
        reduce_bytes,
        sum_bytes,
        passes,
        checkpointing,
        recomputing,
        on_gpu,
        offload,
        rounded,
        zero,
        gathering,
    )
    moments = {
        "forward": _phase(activations.forward, layout, _extra(run, "forward")),
        TURN: _phase(activations.turn, layout, _extra(run, "turn")),
        "backward": _phase(activations.backward, layout, _extra(run, "backward")),
        "backward, at its end": _phase(
            {} if reduces_once(run) else activations.backward_end, layout, _extra(run, "end")
        ),
        "step": _extra(run, "step"),
    }
    if layout.strategy in ("zero1", "zero2") or _by_fsdp(run):
        moments["backward, the last gradients are reduced"] = _extra(run, "rest")
    return {
        moment: placed([part for part in [*static, *parts] if part.bytes], layout, offload, on_gpu=on_gpu)
        for moment, parts in moments.items()
    }


def fullest(moments: Mapping[str, list[MemoryPart]]) -> tuple[str, list[MemoryPart]]:
    """The moment of most memory, and its parts."""
    return max(moments.items(), key=lambda item: sum(part.bytes for part in item[1] if part.place == "device"))


def device_parts(parts: list[MemoryPart], layout: Layout) -> list[MemoryPart]:
    """Memory of a GPU beside a step's own tensors, and the margin for holes between allocations."""
    lasting = {"weights", "frozen weights", QUANTIZED, "optimizer", "averaged weights", "gradients"}
    passing = sum(part.bytes for part in parts if part.name not in lasting)
    return [
        MemoryPart("CUDA context", CONTEXT_BYTES, "measured once"),
        MemoryPart("cuBLAS workspaces", WORKSPACE_BYTES, "measured"),
        *([MemoryPart("NCCL", NCCL_BYTES, "assumed")] if layout.world_size > 1 else []),
        MemoryPart("fragmentation", int(FRAGMENTATION * passing), f"assumed, {FRAGMENTATION:.0%} of transient memory"),
    ]


def _moments(weights: Weights, layout: Layout, in_8_bits: int) -> MemoryPart:
    in_fp32 = split(weights.trainable - in_8_bits, layout.optimizer_shards)
    size = ADAM_MOMENTS * FP32_BYTES * in_fp32 + int(BYTES_8_BIT * split(in_8_bits, layout.optimizer_shards))
    share = in_8_bits / weights.trainable if weights.trainable else 0
    return MemoryPart("optimizer", size, f"two moments, {share:.0%} in 8 bits" if in_8_bits else "two moments in fp32")


def _frozen(weights: Weights, layout: Layout, *, bf16: bool) -> MemoryPart:
    size, kind = (BF16_BYTES, "bf16") if bf16 else (FP32_BYTES, "fp32")
    sliced = weights.sliced - weights.trainable
    if layout.strategy in SHARDED_BY_FSDP and sliced:
        held = weights.frozen - sliced + split(sliced, layout.weight_shards)
        return MemoryPart(
            "frozen weights",
            size * held,
            f"{kind}, sharded"
            + (
                "" if held == split(weights.frozen, layout.weight_shards) else " where others of their part are trained"
            ),
        )
    if layout.strategy == "zero3":
        return MemoryPart("frozen weights", size * split(weights.frozen, layout.weight_shards), f"{kind}, sharded")
    return MemoryPart("frozen weights", size * weights.frozen, f"{kind}, whole on every rank")


def _by_fsdp(run: Run) -> bool:
    """Return whether FSDP gathers, or at least casts, a layer's weights at a time."""
    if run.layout.strategy == "ddp":
        return run.bf16_weights
    return run.layout.strategy in SHARDED_BY_FSDP


def _extra(run: Run, when: Phase) -> list[MemoryPart]:
    """Gradients and what the strategy needs at a moment: forward, turn (backward before its first gradient), backward
    (after it), end (of backward), rest (of gradients is reduced), step."""
    weights, layout = run.weights, run.layout
    local = split(weights.trainable, layout.gradient_shards)
    whole, compute_bytes = weights.trainable, FP32_BYTES if run.precision == "fp32" else BF16_BYTES
    if layout.strategy in ("zero1", "zero2"):
        return partitioned(run, when)
    if layout.strategy == "zero3":
        return gathered(run, when)
    if not _by_fsdp(run):  # ddp: gradients live in buckets that stay
        gradients = MemoryPart("gradients", FP32_BYTES * whole, "fp32, in the buckets of all-reduce")
        if when == "end" and run.rounded:  # all of them, where the network is slower than the backward pass
            return [gradients, MemoryPart("gradients in flight", BF16_BYTES * whole, "compressed")]
        return [gradients]
    sharded = MemoryPart("gradients", FP32_BYTES * local, "fp32, sharded")
    if when == "step":
        return [sharded]
    if when == "rest":
        return [sharded, _moving_rest(run, compute_bytes)]
    # Over one rank nothing travels, so nothing is fetched ahead.
    layers = 1 + run.gathering.layers_ahead if layout.weight_shards > 1 else 1
    if run.bf16_weights and not run.recomputing and when in ("turn", "backward"):
        layers -= 1  # the loss is fullest, for which no layer is there but one on its way
    count = min(weights.sliced, weights.sliced_root + layers * weights.sliced_layer)
    why = f"{layers} layer{'s' if layers != 1 else ''} and the parameters outside of layers"
    if run.gathering.keeps_all and when != "end":  # the backward pass lets go of one layer after the other
        # Computed again, the second layer from the end is fullest, beside the last one's reduction.
        freed = weights.sliced_layer if run.checkpointing and when == "backward" else 0
        count, why = weights.sliced - freed, "all, from the forward to the backward pass"
    parts = [MemoryPart("gathered weights", compute_bytes * count, why)]
    if when == "end" or (run.checkpointing and when == "backward"):
        # Computed again, a layer is fullest after its last product: the gradients of the rest are still to come.
        there = weights.layer if when == "end" else weights.last_product
        moving = compute_bytes * there + FP32_BYTES * weights.layer
        parts.append(MemoryPart("gradients in flight", moving, "of one layer, and of the previous layer in fp32"))
    # The first micro-batch of a step makes the shards; those after it add to them.
    return [*parts, sharded] if run.passes > 1 or when == "end" else parts


def _moving_rest(run: Run, compute_bytes: int) -> MemoryPart:
    """Return the gradients in flight while parameters outside of FSDP's layers are reduced, last and all together.

    They are copied into one fp32 tensor. Then the rank's shard is allocated and added to that of earlier micro-batches.
    The head's gradient stays until then.
    """
    weights = run.weights
    fresh = FP32_BYTES * split(weights.root, run.layout.gradient_shards) if run.passes > 1 else 0
    after = fresh + compute_bytes * weights.head
    copied = FP32_BYTES * weights.root
    # On CPUs a reduce-scatter works on a copy of its own; one rank scatters nothing.
    copies = run.layout.weight_shards > 1 and not run.on_gpu
    beside = copied + after if copies else max(compute_bytes * weights.root, after)
    return MemoryPart("gradients in flight", copied + beside, "of all parameters outside of layers, in fp32")


def _phase(held: Mapping[str, int], layout: Layout, extra: list[MemoryPart]) -> list[MemoryPart]:
    """Traced bytes, divided where pipeline parallelism divides the language model. What tensor parallelism divides is
    traced so."""
    names = {
        WEIGHT_COPIES: ("bf16 copies of weights", "made by autocast, kept to the end of the forward pass"),
        "vision": ("vision tokens", "projected features, and the tower where it runs"),
        "language": ("activations", "held for the backward pass"),
        "head": ("logits", "of label tokens only, a chunk at a time"),
        "backward": ("backward temporaries", ""),
    }
    parts = []
    for category, (name, why) in names.items():
        share = layout.pipeline_parallel if category == WEIGHT_COPIES else 1
        # A pipeline's first stage holds as many micro-batches as there are stages, each of its share of the layers.
        parts.append(MemoryPart(name, held.get(category, 0) // share, why))
    parts.append(MemoryPart(ACTIVATIONS, held.get("offloaded", 0), "inputs of layers, train.activation_offloading"))
    return [*parts, *extra]
