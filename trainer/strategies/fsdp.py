"""Fully sharded data parallel (FSDP2): each rank holds a shard of every trainable weight, gradient and moment.

`fsdp` shards over all ranks. `hsdp` (hybrid) shards over the ranks of a node and replicates over nodes: weights are
gathered inside a node only, and nodes all-reduce gradients. `ddp` with precision bf16 is the case of one rank to a
shard: each rank holds all fp32 masters and computes with bf16 copies of a layer at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard

from vlmpipe.trainer.config.train import TrainConfig
from vlmpipe.trainer.dataloading.batches import MicroBatches, PackedBatch
from vlmpipe.trainer.distributed.process import ProcessContext
from vlmpipe.trainer.models.base import ShardingUnits
from vlmpipe.trainer.models.layers.bf16 import rest_frozen
from vlmpipe.trainer.models.layers.freeze import in_frozen_parts
from vlmpipe.trainer.optimizer.build import build_optimizer
from vlmpipe.trainer.strategies.base import StepResult
from vlmpipe.trainer.strategies.mixed_precision import compute_policy
from vlmpipe.trainer.strategies.torch_base import TorchStrategy, clip_and_step, loss_without_gradients


class Fsdp(TorchStrategy):
    """A `Strategy`. Frozen parts stay whole on every rank, without collectives, unless `train.shard_frozen_weights`.
    Frozen parameters inside a trained part are sharded with it and compute in the same type."""

    def __init__(self, config: TrainConfig, module: nn.Module, blocks: ShardingUnits, worker: ProcessContext) -> None:
        self._config, self._worker = config, worker
        rest_frozen(module, config.precision)
        # Not moved first: a layer is on the device whole while it is sharded, all of them together may not fit.
        self._module = shard(module, blocks, config, _mesh(config, worker))
        if not config.shard_frozen_weights:
            for parameter in in_frozen_parts(module):
                parameter.data = parameter.data.to(worker.device)
        optimizer = build_optimizer(self._module, config.optimizer)
        copies = worker.world_size if config.strategy == "ddp" else 1
        super().__init__(
            self._module,
            optimizer,
            config,
            copies=copies,
            copy=worker.rank if copies > 1 else 0,
        )

    def forward_backward(self, batches: MicroBatches, total_label_tokens: int) -> Tensor:
        # FSDP averages over ranks; the loss is a sum over ranks: multiply by their number.
        scale = self.loss_scale.value * self._worker.world_size / total_label_tokens
        loss_sum = torch.zeros((), device=self._worker.device)
        for number, batch in enumerate(batches, start=1):
            # Gradients are reduce-scattered after every micro-batch, or each rank would hold all of them. hsdp's
            # all-reduce between nodes runs once a step.
            self._module.set_requires_all_reduce(number == len(batches))
            loss = self._module(**batch.to(self._worker.device))
            (loss * scale).backward()
            loss_sum += loss.detach()
        return loss_sum / total_label_tokens

    def forward_loss(self, batch: PackedBatch) -> Tensor:
        return loss_without_gradients(self._module, batch, self._worker.device, "fp32")  # FSDP's policy casts

    def step(self, rate_factor: float) -> StepResult:
        most = self._config.clip_grad_norm
        return self.followed(clip_and_step(self._module, self._optimizer, self.loss_scale, most, rate_factor))


def shard(module: nn.Module, blocks: ShardingUnits, config: TrainConfig, mesh: DeviceMesh) -> FSDPModule:
    """Apply `fully_shard` to each layer, then to the rest. Never to the tower module itself: renaming its class would
    break transformers' capture of hidden states."""
    policy = compute_policy(config)
    offload: OffloadPolicy = OffloadPolicy()
    if config.offload != "none":  # shards, gradients and moments; the update runs on the CPU
        offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    ignored: set[nn.Parameter] = set() if config.shard_frozen_weights else in_frozen_parts(module)
    layers = [layer for layer in (*blocks.tower_layers, *blocks.language_layers) if set(layer.parameters()) - ignored]
    apply = functools.partial(fully_shard, mesh=mesh, mp_policy=policy, offload_policy=offload, ignored_params=ignored)
    for layer in layers:
        blocks.fill(layer)
        apply(layer, reshard_after_forward=not config.keeps_gathered_weights)
    _prefetch(layers, config.prefetch_layers)
    blocks.fill(module)
    # Outside of layers torch frees nothing by default: the backward pass begins there.
    return apply(module, reshard_after_forward=config.reshard_after_forward == "always")


def to_device(module: nn.Module, device: torch.device) -> nn.Module:
    """Move all of a module but tensors on the meta device, which have no values yet."""
    return module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))


def _prefetch(layers: Sequence[nn.Module], ahead: int) -> None:
    """Gather the weights of `ahead` layers ahead of use. FSDP itself gathers one."""
    if ahead == 1:
        return
    for number, layer in enumerate(layers):
        assert isinstance(layer, FSDPModule)
        layer.set_modules_to_forward_prefetch([*layers[number + 1 : number + 1 + ahead]])
        layer.set_modules_to_backward_prefetch([*reversed(layers[max(0, number - ahead) : number])])


def _mesh(config: TrainConfig, worker: ProcessContext) -> DeviceMesh:
    """Mesh of one dimension, or of two: (replicas, ranks of a shard)."""
    shape = None
    if config.strategy == "ddp":
        shape = (worker.world_size, 1)
    elif config.strategy == "hsdp" and worker.num_nodes > 1:
        shape = (worker.num_nodes, worker.local_world_size)
    if shape:
        return init_device_mesh(worker.device.type, shape, mesh_dim_names=("replicate", "shard"))
    return init_device_mesh(worker.device.type, (worker.world_size,))
