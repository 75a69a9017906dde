"""Tensor parallelism (Shoeybi et al. 2019, arXiv 1909.08053): ranks shard the weights of each layer.

Attention is sharded by heads and the MLP by its inner width, in the language model and the tower; embedding and head by
vocabulary, so that no rank holds whole logits. Norms, the projector and other small modules are replicated. Activations
between submodules are plain tensors, replicated or, with `train.sequence_parallel`, sharded by tokens. Model replicas
shard each rank's weights over them by FSDP2.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from vlmpipe.trainer.config.train import TrainConfig
from vlmpipe.trainer.dataloading.batches import MicroBatches, PackedBatch
from vlmpipe.trainer.distributed.process import ProcessContext
from vlmpipe.trainer.models.base import ShardingUnits
from vlmpipe.trainer.models.layers.bf16 import rest_frozen
from vlmpipe.trainer.optimizer.build import build_optimizer
from vlmpipe.trainer.sizing.pipeline_partition import Stage
from vlmpipe.trainer.strategies.base import StepResult
from vlmpipe.trainer.strategies.fsdp import shard, to_device
from vlmpipe.trainer.strategies.tensor_parallel.plan import parallelize
from vlmpipe.trainer.strategies.tensor_parallel.replicated_gradients import ReplicatedGradients
from vlmpipe.trainer.strategies.torch_base import TorchStrategy, clip_and_step, loss_without_gradients


class TensorParallel(TorchStrategy):
    """A `Strategy`. Mixed precision is FSDP's policy, also where there is one replica."""

    def __init__(self, config: TrainConfig, module: nn.Module, blocks: ShardingUnits, worker: ProcessContext) -> None:
        self._config, self._worker = config, worker
        rest_frozen(module, config.precision)
        ranks = config.tensor_parallel
        self._num_replicas, self._leads = worker.world_size // ranks, worker.rank % ranks == 0
        mesh = init_device_mesh(worker.device.type, (self._num_replicas, ranks), mesh_dim_names=("replicas", "tensor"))
        partial = parallelize(
            blocks, mesh["tensor"], Stage.whole(len(blocks.language_layers)), sequence=config.sequence_parallel
        )
        self._replicated = ReplicatedGradients(module, partial, mesh.get_group("tensor"))
        self._module = shard(to_device(module, worker.device), blocks, config, mesh["replicas"])
        optimizer = build_optimizer(self._module, config.optimizer)
        super().__init__(self._module, optimizer, config)

    def forward_backward(self, batches: MicroBatches, total_label_tokens: int) -> Tensor:
        # FSDP averages over replicas; the loss is a sum over them: multiply by their number.
        scale = self.loss_scale.value * self._num_replicas / total_label_tokens
        loss_sum = torch.zeros((), device=self._worker.device)
        for batch in batches:
            loss = self._module(**batch.to(self._worker.device))
            (loss * scale).backward()
            loss_sum += loss.detach()
        self._replicated.combine()
        # Every rank of a replica has its loss; one returns it.
        return loss_sum / total_label_tokens if self._leads else torch.zeros_like(loss_sum)

    def forward_loss(self, batch: PackedBatch) -> Tensor:
        loss = loss_without_gradients(self._module, batch, self._worker.device, "fp32")  # FSDP's policy casts
        return loss if self._leads else torch.zeros_like(loss)

    def step(self, rate_factor: float) -> StepResult:
        most = self._config.clip_grad_norm
        return self.followed(clip_and_step(self._module, self._optimizer, self.loss_scale, most, rate_factor))
