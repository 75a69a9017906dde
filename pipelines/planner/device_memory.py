"""Does it fit? Memory of one rank on the machine of the run file, and the nearest settings that fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from pipelines.config import RunConfig, parse_run_config
from pipelines.planner.activations import activations, is_cached
from pipelines.planner.architecture import Architecture
from pipelines.planner.catalog import Gpu, Machine
from pipelines.planner.layout import Layout, layout_of
from pipelines.planner.memory import GIB, Memory, MemoryPart, Setting, device_parts, training_parts
from pipelines.run_file import apply_overrides
from trainer.errors import ConfigError

# Vertex AI says that its agents may take up to 40 % of an n1-standard-4's memory; the same is assumed of others.
CPU_SHARE = 0.6
PROCESS_BYTES = 1 << 30  # Python with torch and transformers, per rank
NEAREST = 3


def estimate_memory(
    config: RunConfig, model: Architecture, machine: Machine, gpu: Gpu | None, *, nearest: bool = True
) -> Memory:
    """Memory of the fullest rank of the training job."""
    layout = layout_of(config)
    moment, parts = _parts(config, model, layout)
    if gpu is None:
        processes = "1 process" if layout.ranks_per_node == 1 else f"{layout.ranks_per_node} processes"
        device = f"{machine.machine_type}, {processes}"
        capacity = int(CPU_SHARE * machine.memory_gib * GIB / layout.ranks_per_node)
        parts.append(MemoryPart("process", PROCESS_BYTES, "Python, torch and transformers, assumed"))
    else:
        device, capacity = gpu.accelerator_type, int(gpu.memory_gib * GIB)
        parts += device_parts(parts, layout)
    memory = Memory(device, capacity, tuple(parts), moment)
    if nearest and not memory.fits:
        found = list(_nearest(config, model, machine, gpu))
        return dataclasses.replace(memory, nearest=tuple(found[:NEAREST]))
    return memory


def _parts(config: RunConfig, model: Architecture, layout: Layout) -> tuple[str, list[MemoryPart]]:
    train = config.train
    whole = config.model_copy(update={"model": model.model})
    return training_parts(
        model.shape,
        layout,
        activations(whole, model.shape),
        cached=is_cached(config),
        precision=train.precision,
        passes=train.global_batch_rows // (layout.data_parallel * train.micro_batch_rows),
        checkpointing=train.activation_checkpointing == "full",
    )


def _nearest(config: RunConfig, model: Architecture, machine: Machine, gpu: Gpu | None) -> Iterator[Setting]:
    """Changes that make it fit, those first that leave most as it is. None changes what the model learns."""
    for change in _changes(config):
        try:
            other = parse_run_config(apply_overrides(config.to_dict(), change), "a nearby setting")
        except ConfigError:
            continue  # such as a batch that does not divide over more nodes
        memory = estimate_memory(other, model, machine, gpu, nearest=False)
        if memory.fits:
            yield Setting(change, memory.total_bytes, True)


def _changes(config: RunConfig) -> Iterator[dict[str, Any]]:
    train, nodes = config.train, config.cluster.replica_count
    checkpointing: dict[str, Any] = {}
    if train.activation_checkpointing == "none":
        checkpointing = {"train.activation_checkpointing": "full"}
    smaller: dict[str, Any] = {"train.micro_batch_rows": 1} if train.micro_batch_rows > 1 else {}
    partly: dict[str, Any] = {"train.strategy": "zero2"} if train.strategy == "ddp" else {}
    sharded: dict[str, Any] = {"train.strategy": "fsdp"} if train.strategy != "fsdp" else {}
    fullest = checkpointing | smaller | sharded
    singles = [checkpointing, smaller, partly, sharded]
    pairs = [checkpointing | smaller, checkpointing | partly, checkpointing | sharded, smaller | sharded]
    more_nodes = [
        fullest | {"cluster.replica_count": factor * nodes, "cluster.reduction_server": None} for factor in (2, 4)
    ]
    seen: list[dict[str, Any]] = []
    for change in [*singles, *pairs, fullest, *more_nodes]:
        if change and change not in seen:
            seen.append(change)
            yield change
