"""Host memory of a node: processes, offloaded state, micro-batches and checkpoints in flight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from vlmpipe.catalog.machines import Machine
from vlmpipe.config.run_config import RunConfig
from vlmpipe.planner.memory.activations import largest_sequences
from vlmpipe.planner.memory.components import BF16_BYTES, FP32_BYTES, MemoryPart, Place, split
from vlmpipe.planner.parallel_layout import Layout
from vlmpipe.trainer.dataloading.micro_batch_queue import AHEAD_BYTES, STEPS_AHEAD
from vlmpipe.trainer.sizing.image_preparation import FREE_BLOCKS
from vlmpipe.trainer.sizing.model_shape import ModelShape

OF_THE_OPTIMIZER = frozenset(
    (
        "optimizer",
        "optimizer's weights",
        "averaged weights",
        "gradients",
        "optimizer's gradients",
        "summed gradients",
        "updated weights",
    )
)
WEIGHTS = "weights"
NODE_WEIGHTS = "node's copy of weights"
# What leaves the device, by train.offload.
LEAVE = {
    "none": frozenset[str](),
    "optimizer": OF_THE_OPTIMIZER,
    "optimizer+weights": OF_THE_OPTIMIZER | {WEIGHTS, "frozen weights", NODE_WEIGHTS},
}
ACTIVATIONS = "offloaded activations"
SAVED = ("optimizer", "optimizer's weights", "averaged weights", WEIGHTS)

GIB = 2**30
TOKEN_BYTES = 6 * 8  # identity, label with its place, and positions on up to three axes
PROCESS_BYTES = 1 << 30  # Python with torch and transformers, per rank


@dataclass(frozen=True)
class HostMemory:
    """The answer for one node."""

    machine: str
    capacity_bytes: int
    parts: tuple[MemoryPart, ...]

    @property
    def total_bytes(self) -> int:
        return sum(part.bytes for part in self.parts)

    @property
    def fits(self) -> bool:
        return self.total_bytes <= self.capacity_bytes

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {
            "machine": self.machine,
            "capacity_bytes": self.capacity_bytes,
            "total_bytes": self.total_bytes,
            "fits": self.fits,
            "parts": [part.as_dict() for part in self.parts],
        }


def placed(parts: Sequence[MemoryPart], layout: Layout, offload: str, *, on_gpu: bool) -> list[MemoryPart]:
    """The parts of one rank, each where it lies. Without a GPU the device's memory is the machine's."""
    leave = LEAVE[offload] - ({"frozen weights"} if layout.strategy != "zero3" else set())  # whole elsewhere
    leave |= {ACTIVATIONS}

    def place(part: MemoryPart) -> Place:
        return "machine" if on_gpu and part.name in leave else "device"

    return [replace(part, place=place(part)) for part in parts]


def micro_batches(config: RunConfig, shape: ModelShape, layout: Layout, *, cached: bool) -> MemoryPart:
    """Peak memory of a rank's loader (`vlmpipe.trainer.dataloading.micro_batch_queue`): micro-batches that wait or are
    being made, two beyond that until their size is known, and the one in training; and memory that is kept for the
    images of the next ones (`vlmpipe.trainer.models.pixels`)."""
    train = config.train
    nbytes = train.micro_batch_size * sequence_bytes(config, shape, cached=cached)
    free = 0 if cached else FREE_BLOCKS * nbytes
    if config.cluster.accelerator_count:
        nbytes = 1 << (nbytes - 1).bit_length()  # torch rounds what is page-locked up to a power of two
    passes = max(1, train.global_batch_size // (layout.data_parallel * train.micro_batch_size))
    waiting = min(max(nbytes, AHEAD_BYTES), STEPS_AHEAD * passes * nbytes)
    why = f"images and tokens ahead of training, at most {nbytes / 2**20:,.0f} MiB each, whatever a step accumulates"
    return MemoryPart("micro-batches", waiting + 3 * nbytes + free, why, place="machine")


def sequence_bytes(config: RunConfig, shape: ModelShape, *, cached: bool) -> int:
    """Return the bytes of the packed sequence with most images, as training reads it: tokens, pixels or features."""
    images, labels = max(largest_sequences(config, shape))
    # Images that differ fill their tokens, the last one partly.
    of_largest = (config.data.sequence_length - labels) / shape.image_tokens if shape.images_differ else images
    if cached:
        numbers = shape.stored_numbers or shape.image_tokens * shape.feature_width
        image_bytes = BF16_BYTES * numbers
    else:
        image_bytes = FP32_BYTES * shape.tower_tokens * shape.patch_pixels
    return round(of_largest * (image_bytes + shape.image_input_bytes)) + TOKEN_BYTES * config.data.sequence_length


def host_memory(parts: Sequence[MemoryPart], layout: Layout, machine: Machine) -> HostMemory:
    """Host memory of a node in an update, beside processes and the copy that becomes a checkpoint."""
    ranks = layout.ranks_per_node
    held = [MemoryPart(part.name, ranks * part.bytes, part.why) for part in parts if part.place == "machine"]
    processes = MemoryPart("processes", ranks * PROCESS_BYTES, "Python, torch and transformers, assumed")
    capacity = machine.usable_bytes
    saved = sum(int(ranks * _staged_share(part.name, layout) * part.bytes) for part in parts if part.name in SAVED)
    checkpoint = MemoryPart("checkpoint", saved, "a copy of what is saved, until it is written")
    return HostMemory(machine.machine_type, capacity, (*held, processes, checkpoint))


def start_memory(
    shape: ModelShape, layout: Layout, machine: Machine, *, deferred: bool, bf16_weights: bool = False
) -> HostMemory:
    """Host memory of a node before the first step: each rank's model in fp32, or one matrix of it where weights are
    read while they are sharded (`vlmpipe.trainer.models.layers.deferred_weights`).

    `bf16_weights`: ZeRO's masters begin with the fp32 weights, of which ZeRO-3 holds a rank's slices here. DeepSpeed
    casts other stages' whole model here.
    """
    ranks, language = layout.ranks_per_node, shape.language
    held, why = shape.total_parameters, "in fp32, built whole by each rank"
    bytes_each = FP32_BYTES
    if bf16_weights and layout.strategy in ("zero1", "zero2"):
        bytes_each, why = FP32_BYTES + BF16_BYTES, f"{why}, and in bf16"
    if deferred:
        held = max(language.hidden * language.intermediate, language.hidden * shape.vocabulary)
        why = "in fp32, a matrix at a time"
    processes = MemoryPart("processes", ranks * PROCESS_BYTES, "Python, torch and transformers, assumed")
    parts = [MemoryPart("model at the start", ranks * bytes_each * held, why), processes]
    if bf16_weights and layout.strategy == "zero3":
        slices = split(shape.trainable_parameters, layout.world_size)
        parts.append(MemoryPart("masters at the start", ranks * FP32_BYTES * slices, "in fp32, each rank's slice"))
    return HostMemory(machine.machine_type, machine.usable_bytes, tuple(parts))


def _staged_share(part: str, layout: Layout) -> float:
    """Return the share of a rank's state that each rank of the fullest node copies to host memory for a checkpoint.

    See `trainer.strategies.torch_base.TorchStrategy`. Of ZeRO's weights the optimizer's are saved.
    """
    if layout.strategy == "ddp":
        return 1 / layout.replicas
    if layout.strategy.startswith("zero") and part == WEIGHTS:
        return 0
    return 1
