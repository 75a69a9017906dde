"""Time of the optimizer update, on the GPU or offloaded (`train.offload`)."""

from __future__ import annotations

from trainer.sizing.model_shape import ModelShape
from vlmpipe.catalog.machines import Gpu, Machine
from vlmpipe.config.run_config import RunConfig
from vlmpipe.planner.memory.host import CPU_SHARE, GIB, PROCESS_BYTES
from vlmpipe.planner.parallel_layout import Layout

# Memory traffic per fp32 parameter of torch's fused AdamW, which reads weight, gradient and two moments once (16) and
# writes all but the gradient (12), and of clipping (norm 4, scaling 8).
UPDATE_BYTES_PER_PARAMETER = 40
AVERAGE_UPDATE_BYTES_PER_PARAMETER = 12  # torch's foreach lerp reads the average and the weight, and writes the average
# What is read from a disk and written back, of each parameter whose state lies there: a weight and two moments.
DISK_BYTES_PER_PARAMETER = 24
AVERAGE_DISK_BYTES_PER_PARAMETER = 8
# What stays in the machine's memory beside it, at most: gradients, their sums over micro-batches, and weights on their
# way back, in fp32 each. See `vlmpipe.planner.memory.zero`.
BYTES_PER_PARAMETER_BESIDE_DISK = 12

# Bytes a second of one rank's update in the machine's memory. Measured: fused AdamW on one thread of an AMD EPYC moved
# 48e9, with clipping 44e9 (part host-update of `bench-planner`). Less is taken: a machine's ranks share its memory.
HOST_BYTES_PER_S = 20e9
# A GPU's link to the machine's memory: assumed. PCI Express 3.0 x16 has 15.8 GB/s, each generation after it twice that.
LINK_BYTES_PER_S = 12e9


def update_times(
    config: RunConfig, shape: ModelShape, layout: Layout, machine: Machine, gpu: Gpu, *, micro_steps: int
) -> dict[str, float]:
    """Seconds of a step by what they are for. AdamW, and the average that follows it, are bound by the bytes that they
    move for the parameters that a rank updates."""
    train = config.train
    owned = _owned(shape, layout)
    moved = UPDATE_BYTES_PER_PARAMETER + (AVERAGE_UPDATE_BYTES_PER_PARAMETER if train.ema_decay else 0)
    if train.offload == "none":
        return {"optimizer update": owned * moved / (gpu.memory_gbytes_per_s * 1e9)}
    # Gradients come in fp32. Weights go back once, or whenever they are gathered from the machine's memory.
    copies = 1 + (2 * micro_steps if train.offload == "optimizer+weights" else 1)
    times = {
        "optimizer update": owned * moved / HOST_BYTES_PER_S,
        "copies to and from the machine's memory": owned * 4 * copies / LINK_BYTES_PER_S,
    }
    if train.nvme_path and not _stays_in_memory(config, shape, layout, machine):
        moved_bytes = layout.ranks_per_node * owned * _disk_bytes(config)
        times["reading and writing the disk"] = moved_bytes / (config.plan.disk_gbytes_per_s * 1e9)
    return times


def _owned(shape: ModelShape, layout: Layout) -> float:
    """Parameters that a rank updates."""
    return shape.trainable_parameters / (layout.optimizer_shards * layout.model_ranks)


def _disk_bytes(config: RunConfig) -> int:
    """Read and written of a parameter's state."""
    return DISK_BYTES_PER_PARAMETER + (AVERAGE_DISK_BYTES_PER_PARAMETER if config.train.ema_decay else 0)


def _stays_in_memory(config: RunConfig, shape: ModelShape, layout: Layout, machine: Machine) -> bool:
    """Whether a node's memory has room for all state on its disk as well: the system then writes it behind, and reads
    nothing. With room for some of it nothing is gained: an update goes through all of it, and what was used longest
    ago, which is let go of first, is what comes next."""
    of_rank = PROCESS_BYTES + _owned(shape, layout) * (BYTES_PER_PARAMETER_BESIDE_DISK + _disk_bytes(config) / 2)
    return layout.ranks_per_node * of_rank <= CPU_SHARE * machine.memory_gib * GIB


def update_sentences(config: RunConfig, shape: ModelShape, layout: Layout, machine: Machine) -> list[str]:
    """What the times above take for granted."""
    if config.train.offload == "none":
        return []
    said = [
        f"An offloaded update moves {HOST_BYTES_PER_S / 1e9:g} GB/s a rank in the machine's memory (one thread, alone, "
        f"moved 44 on another machine), and {LINK_BYTES_PER_S / 1e9:g} GB/s between it and each GPU (assumed). Nothing "
        "hides them."
    ]
    if config.train.nvme_path and _stays_in_memory(config, shape, layout, machine):
        said.append(
            "The machine's memory has room for what lies under train.nvme_path as well: no step is taken to wait for "
            "the disk."
        )
    elif config.train.nvme_path:
        said.append(
            f"The disk under train.nvme_path moves {config.plan.disk_gbytes_per_s:g} GB/s a node "
            "(plan.disk_gbytes_per_s, assumed): all optimizer state is read and written in each step."
        )
    return said
