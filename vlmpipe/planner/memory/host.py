"""Host memory of a node: processes, offloaded state, checkpoints in flight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from vlmpipe.catalog.machines import Machine
from vlmpipe.planner.memory.components import BF16_BYTES, FP32_BYTES, MemoryPart, Place, split
from vlmpipe.planner.parallel_layout import Layout
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
TO_DISK = frozenset(("optimizer", "optimizer's weights", "averaged weights"))  # with train.nvme_path
ACTIVATIONS = "offloaded activations"
ERRORS = "error feedback"
SAVED = ("optimizer", "optimizer's weights", "averaged weights", ERRORS, WEIGHTS)

GIB = 2**30
# Vertex AI says that its agents may take up to 40 % of an n1-standard-4's memory; the same is assumed of others.
CPU_SHARE = 0.6
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

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "machine": self.machine,
            "capacity_bytes": self.capacity_bytes,
            "total_bytes": self.total_bytes,
            "fits": self.fits,
            "parts": [part.as_dict() for part in self.parts],
        }


def placed(
    parts: Sequence[MemoryPart], layout: Layout, offload: str, *, to_disk: bool, on_gpu: bool
) -> list[MemoryPart]:
    """The parts of one rank, each where it lies. Without a GPU the device's memory is the machine's."""
    leave = LEAVE[offload] - ({"frozen weights"} if layout.strategy != "zero3" else set())  # whole elsewhere
    leave |= {ACTIVATIONS}

    def place(part: MemoryPart) -> Place:
        if to_disk and part.name in TO_DISK:
            return "disk"
        return "machine" if on_gpu and part.name in leave else "device"

    return [replace(part, place=place(part)) for part in parts]


def host_memory(parts: Sequence[MemoryPart], layout: Layout, machine: Machine) -> HostMemory:
    """What a node holds of its ranks' parts in an update, beside processes and the copy that becomes a checkpoint.

    Of what lies on a disk there is no copy: it is written from there (`trainer.strategies.deepspeed.checkpoint_files`).
    """
    ranks = layout.ranks_per_node
    held = [MemoryPart(part.name, ranks * part.bytes, part.why) for part in parts if part.place == "machine"]
    processes = MemoryPart("processes", ranks * PROCESS_BYTES, "Python, torch and transformers, assumed")
    capacity = int(CPU_SHARE * machine.memory_gib * GIB)
    if any(part.place == "disk" for part in parts):
        return HostMemory(machine.machine_type, capacity, (*held, processes))
    saved = sum(int(ranks * _staged_share(part.name, layout) * part.bytes) for part in parts if part.name in SAVED)
    checkpoint = MemoryPart("checkpoint", saved, "a copy of what is saved, until it is written")
    return HostMemory(machine.machine_type, capacity, (*held, processes, checkpoint))


def start_memory(
    shape: ModelShape, layout: Layout, machine: Machine, *, deferred: bool, bf16_weights: bool = False
) -> HostMemory:
    """What a node holds before the first step: each rank's model in fp32, or one matrix of it where weights are read
    while they are sharded (`vlmpipe.trainer.models.layers.deferred_weights`).

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
    return HostMemory(machine.machine_type, int(CPU_SHARE * machine.memory_gib * GIB), tuple(parts))


def _staged_share(part: str, layout: Layout) -> float:
    """Of one rank's part, what each rank of the fullest node copies for a checkpoint: see
    `trainer.strategies.torch_base.TorchStrategy`; DeepSpeed writes weights that all ranks hold from the first alone."""
    if layout.strategy == "ddp" and part != ERRORS:  # each rank has its own
        return 1 / layout.replicas
    if layout.strategy in ("zero1", "zero2") and part == WEIGHTS:
        return 1 / layout.ranks_per_node
    return 1
