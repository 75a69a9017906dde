"""Tensor parallelism (Shoeybi et al. 2019, arXiv 1909.08053): ranks shard the weights of each layer.

Attention is sharded by heads and the MLP by its inner width, in the language model and the tower; embedding and head by
vocabulary, so that no rank holds whole logits. Norms, the projector and other small modules are replicated. Activations
between submodules are plain tensors, replicated or, with `train.sequence_parallel`, sharded by tokens. Model replicas
all-reduce their gradients (`tp`), or shard each rank's weights over the replicas by FSDP2 (`tp+fsdp`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from trainer.config.train import TrainConfig
from trainer.dataloading.batches import PackedBatch
from trainer.distributed.process import ProcessContext
from trainer.models.base import ShardingUnits
from trainer.optimizer import build_optimizer
from trainer.sizing.pipeline_partition import Stage
from trainer.strategies.base import StepResult
from trainer.strategies.fsdp import shard
from trainer.strategies.gradient_buckets import GradientBuckets
from trainer.strategies.mixed_precision import LossScale, autocast
from trainer.strategies.tensor_parallel.plan import parallelize, sum_partial_gradients
from trainer.strategies.torch_base import TorchStrategy, clip_and_step, loss_without_gradients


class TensorParallel(TorchStrategy):
    """A `Strategy`. Mixed precision is FSDP's policy for `tp+fsdp`, and autocast for `tp`."""

    def __init__(self, config: TrainConfig, module: nn.Module, blocks: ShardingUnits, worker: ProcessContext) -> None:
        self._config, self._worker, self._module = config, worker, module
        ranks = config.tensor_parallel
        self._num_replicas, self._leads = worker.world_size // ranks, worker.rank % ranks == 0
        mesh = init_device_mesh(worker.device.type, (self._num_replicas, ranks), mesh_dim_names=("replicas", "tensor"))
        self._tensor_group, self._replica_group = mesh.get_group("tensor"), mesh.get_group("replicas")
        self._partial_gradients = parallelize(
            blocks, mesh["tensor"], Stage.whole(len(blocks.language_layers)), sequence=config.sequence_parallel
        )
        module.to(worker.device)
        self._is_sharded = config.strategy == "tp+fsdp" and self._num_replicas > 1
        if self._is_sharded:
            shard(module, blocks, config, mesh["replicas"])
        optimizer = build_optimizer(module, config.optimizer)
        super().__init__(module, optimizer, LossScale(config.precision), ema_decay=config.ema_decay)
        self._buckets: GradientBuckets | None = None

    def forward_backward(self, batches: Sequence[PackedBatch], total_label_tokens: int) -> Tensor:
        if not self._is_sharded and self._buckets is None:
            # Only after a checkpoint is loaded: torch mistakes an optimizer with gradients for one without state.
            trained = [parameter for parameter in self._module.parameters() if parameter.requires_grad]
            self._buckets = GradientBuckets(trained, self._replica_group)
        # FSDP averages over replicas, the buckets sum.
        scale = self.loss_scale.value * (self._num_replicas if self._is_sharded else 1) / total_label_tokens
        by_autocast = "fp32" if self._is_sharded else self._config.precision
        loss_sum = torch.zeros((), device=self._worker.device)
        for number, batch in enumerate(batches, start=1):
            if self._buckets and number == len(batches):
                self._buckets.expect_last()
            with autocast(by_autocast, self._worker.device):
                loss = self._module(**batch.to(self._worker.device))
            (loss * scale).backward()
            loss_sum += loss.detach()
        if self._buckets:
            self._buckets.wait()
        sum_partial_gradients(self._partial_gradients, self._tensor_group)
        # Every rank of a replica has its loss; one returns it.
        return loss_sum / total_label_tokens if self._leads else torch.zeros_like(loss_sum)

    def forward_loss(self, batch: PackedBatch) -> Tensor:
        by_autocast = "fp32" if self._is_sharded else self._config.precision
        return loss_without_gradients(self._module, batch, self._worker.device, by_autocast)

    def step(self, rate_factor: float) -> StepResult:
        most, keep = self._config.clip_grad_norm, self._buckets is not None
        scale = self.loss_scale
        return self.followed(
            clip_and_step(self._module, self._optimizer, scale, most, rate_factor, keep_gradients=keep)
        )
