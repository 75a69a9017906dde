"""Estimates whether a run fits: memory of one rank on the run file's machine, and the nearest settings that fit."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from vlmpipe.catalog.machines import Device, Machine
from vlmpipe.catalog.this_machine import NAME as THIS_MACHINE
from vlmpipe.config.overrides import apply_overrides
from vlmpipe.config.run_config import RunConfig, parse_run_config
from vlmpipe.planner.memory.activations import NO_ACTIVATIONS, activations, can_recompute_tower
from vlmpipe.planner.memory.components import MemoryPart, Setting
from vlmpipe.planner.memory.host import PROCESS_BYTES, host_memory, micro_batches, start_memory
from vlmpipe.planner.memory.phases import run_phases
from vlmpipe.planner.memory.pipeline_partition import planned_stages
from vlmpipe.planner.memory.pipeline_stage import stage_phases
from vlmpipe.planner.memory.rank import GIB, Memory, device_parts, fullest
from vlmpipe.planner.memory.reserved import idle_parts
from vlmpipe.planner.model_architecture import Architecture
from vlmpipe.planner.parallel_layout import Layout, layout_of, more_context_parallel
from vlmpipe.planner.workload import Workload, is_cached
from vlmpipe.trainer.config.job import defers_weights
from vlmpipe.trainer.config.strategies import SHARDING_FROZEN
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.sizing.deepspeed_config import with_node_copy
from vlmpipe.trainer.sizing.model_shape import ModelShape

NEAREST = 3


def estimate_memory(
    config: RunConfig,
    model: Architecture,
    machine: Machine,
    gpu: Device | None,
    *,
    load: Workload | None = None,
    nearest: bool = True,
    traced: bool = True,
) -> Memory:
    """Memory of the fullest rank of the training job.

    Args:
        load: decides where a pipeline is cut; None takes sequences as assumed.
        nearest: find settings that fit where these do not.
        traced: False leaves out activations, for a lower bound that needs neither torch nor a trace. Of a pipeline,
            whose cut depends on them, they are counted all the same.
    """
    layout = layout_of(config)
    if layout.pipeline_parallel > 1:
        moments = _stage_phases(config, model, layout, load or Workload.assumed(config, model.shape))
    else:
        moments = _phases(config, model, layout, traced=traced)
    moment, held = fullest(moments)
    parts = [part for part in held if part.place == "device"]
    ahead = micro_batches(config, model.shape, layout, cached=is_cached(config))
    host = start = None
    idle: list[MemoryPart] = []
    if gpu is None:
        processes = "1 process" if layout.ranks_per_node == 1 else f"{layout.ranks_per_node} processes"
        device = f"{machine.machine_type}, {processes}"
        if machine.machine_type == THIS_MACHINE:
            device = "process on this machine"
        capacity = machine.usable_bytes // layout.ranks_per_node
        parts.append(MemoryPart("process", PROCESS_BYTES, "Python, torch and transformers, assumed"))
        parts.append(ahead)
    else:
        device, capacity = gpu.label, int(gpu.memory_gib * GIB)
        if layout.pipeline_parallel == 1:
            idle = idle_parts(config, model.shape, layout, moment, parts)
        parts += device_parts(parts, layout)
        hosts = [host_memory([*held, ahead], layout, machine) for held in moments.values()]
        host = max(hosts, key=lambda machine: machine.total_bytes)
        deferred = defers_weights(config.model, config.train)
        in_bf16 = config.train.has_bf16_weights
        start = start_memory(model.shape, layout, machine, deferred=deferred, bf16_weights=in_bf16)
    memory = Memory(device, capacity, tuple(parts), moment, host=host, start=start, idle=tuple(idle))
    if nearest and not memory.fits:
        candidates = itertools.islice(_nearest(config, model, machine, gpu, load), NEAREST)
        return dataclasses.replace(memory, nearest=tuple(candidates))
    return memory


def _phases(config: RunConfig, model: Architecture, layout: Layout, *, traced: bool) -> dict[str, list[MemoryPart]]:
    train = config.train
    whole = config.model_copy(update={"model": model.model})
    return run_phases(
        whole,
        model.shape,
        layout,
        activations(whole, model.shape) if traced else NO_ACTIVATIONS,
        cached=is_cached(config),
        passes=train.global_batch_size // (layout.data_parallel * train.micro_batch_size),
        on_gpu=bool(config.cluster.accelerator_count),
    )


def _stage_phases(
    config: RunConfig, model: Architecture, layout: Layout, load: Workload
) -> dict[str, list[MemoryPart]]:
    train = config.train
    whole = config.model_copy(update={"model": model.model})
    stages = planned_stages(config, model.shape, layout, load, cached=is_cached(config))
    passes = train.global_batch_size // (layout.data_parallel * train.micro_batch_size)
    on_gpu = bool(config.cluster.accelerator_count)
    return {
        f"{moment} of stage {number + 1}": parts
        for number in range(layout.pipeline_parallel)
        for moment, parts in stage_phases(whole, model.shape, stages, number, passes=passes, on_gpu=on_gpu).items()
    }


def _nearest(
    config: RunConfig, model: Architecture, machine: Machine, gpu: Device | None, load: Workload | None
) -> Iterator[Setting]:
    """Changes that make it fit, those first that leave most as it is. None changes what the model learns."""
    for change in _changes(config, model.shape):
        if machine.machine_type == THIS_MACHINE and any(key.startswith("cluster.") for key in change):
            continue  # of this one there are no more
        try:
            other = parse_run_config(apply_overrides(config.to_dict(), change), "a nearby setting")
        except ConfigError:
            continue  # such as a batch that does not divide over more nodes
        shape = dataclasses.replace(model.shape, shards_frozen=other.train.shard_frozen_weights)
        of_other = dataclasses.replace(model, shape=shape)
        # A trace takes a third of a second where none like it is cached, and most changes are out of the question.
        if not estimate_memory(other, of_other, machine, gpu, load=load, nearest=False, traced=False).fits:
            continue
        memory = estimate_memory(other, of_other, machine, gpu, load=load, nearest=False)
        if memory.fits:
            yield Setting(change, memory.total_bytes, True)


def _changes(config: RunConfig, shape: ModelShape) -> Iterator[dict[str, object]]:
    train, nodes = config.train, config.cluster.replica_count
    tower: dict[str, object] = {}
    if can_recompute_tower(config, shape):
        tower = {"train.tower_activation_checkpointing": True}
    checkpointing: dict[str, object] = dict(tower)
    selective: dict[str, object] = {}
    if train.activation_checkpointing != "full":
        checkpointing |= {"train.activation_checkpointing": "full"}
    if train.activation_checkpointing == "none":
        selective = {"train.activation_checkpointing": "selective"}
    in_host: dict[str, object] = {}
    if not train.activation_offloading:
        in_host = checkpointing | {"train.activation_offloading": True}
    smaller: dict[str, object] = {"train.micro_batch_size": 1} if train.micro_batch_size > 1 else {}
    partly: dict[str, object] = {"train.strategy": "zero2"} if train.strategy == "ddp" else {}
    sharded: dict[str, object] = {"train.strategy": "fsdp"} if train.strategy not in ("fsdp", "zero3") else {}
    if train.precision == "bf16-autocast" and sharded:
        sharded |= {"train.precision": "bf16"}
    frozen_too = {"train.strategy": "zero3"}  # which shards frozen weights as well
    offload: dict[str, object] = {
        "train.offload": "optimizer" if train.strategy.startswith("zero") else "optimizer+weights"
    }
    if train.strategy in ("zero1", "zero2") and train.precision == "bf16":
        offload |= frozen_too  # these would sum offloaded gradients in bf16
    if train.model_ranks > 1:
        sharded |= {"train.tensor_parallel": 1, "train.pipeline_parallel": 1, "train.virtual_stages": 1}
    frozen_sharded: dict[str, object] = {}
    if shape.trainable_parameters < shape.total_parameters and not train.shard_frozen_weights:
        frozen_sharded = {"train.shard_frozen_weights": True}
        if train.strategy not in SHARDING_FROZEN:
            frozen_sharded |= sharded
    without_copy: dict[str, object] = {}
    if layout_of(config).copy_shards:
        without_copy = {"train.deepspeed": with_node_copy(train, 0)}
    is_gathered = train.reshard_after_forward == "never"
    gathered: dict[str, object] = {"train.reshard_after_forward": "auto"} if is_gathered else {}
    if train.prefetch_layers > 1:
        gathered |= {"train.prefetch_layers": 1}
    fullest = checkpointing | smaller | sharded
    singles = [gathered, without_copy, selective, tower, checkpointing, smaller, partly, sharded, frozen_sharded]
    pairs = [checkpointing | smaller, checkpointing | partly, checkpointing | sharded, smaller | sharded]
    pairs += [checkpointing | frozen_sharded, smaller | frozen_sharded]
    more_nodes = [
        fullest | {"cluster.replica_count": factor * nodes, "cluster.reduction_server": None} for factor in (2, 4)
    ]
    pairs.append(in_host)
    shared = [checkpointing | smaller | degree for degree in more_context_parallel(config, shape.language.heads)]
    seen: list[dict[str, object]] = []
    smallest = checkpointing | smaller | frozen_too
    offloaded = list[dict[str, object]]()
    if train.offload == "none":
        offloaded = [offload, fullest | {"train.offload": "optimizer+weights"}]
    more: list[dict[str, object]] = [fullest, fullest | frozen_sharded, smallest, *shared, *offloaded, *more_nodes]
    for change in (*singles, *pairs, *more):
        if change and change not in seen:
            seen.append(change)
            yield change
