"""Distributed data parallel: every rank holds the model, gradients are all-reduced."""

from __future__ import annotations

import contextlib
import warnings

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from vlmpipe.trainer.config.train import TrainConfig
from vlmpipe.trainer.dataloading.batches import MicroBatches, PackedBatch
from vlmpipe.trainer.distributed.process import ProcessContext
from vlmpipe.trainer.optimizer.build import build_optimizer
from vlmpipe.trainer.sizing.ddp_gradients import bucket_cap_mib
from vlmpipe.trainer.strategies.base import StepResult
from vlmpipe.trainer.strategies.mixed_precision import autocast
from vlmpipe.trainer.strategies.torch_base import TorchStrategy, clip_and_step, loss_without_gradients

COMPRESSED = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Ddp(TorchStrategy):
    """A `Strategy`. With one rank it runs the bare module: the reference of every equality test."""

    def __init__(self, config: TrainConfig, module: nn.Module, worker: ProcessContext) -> None:
        self._config, self._worker = config, worker
        module = module.to(worker.device)
        self._module: nn.Module = module
        if worker.world_size > 1:
            with warnings.catch_warnings():
                # torch 2.13 renames broadcast_buffers; 2.11 and 2.12 know no other name.
                warnings.simplefilter("ignore", FutureWarning)
                replicated = DistributedDataParallel(
                    module,
                    broadcast_buffers=False,
                    gradient_as_bucket_view=True,
                    bucket_cap_mb=bucket_cap_mib(reducers=worker.num_reducers > 0),
                    # DDP rebuilds its buckets after the first step, unless it looks for unused parameters. A resumed
                    # run would use the first layout in a step for which the uninterrupted run used the second, and
                    # sums over more than two ranks would be taken in another order.
                    find_unused_parameters=config.deterministic,
                )
            if number_type := COMPRESSED.get(config.gradient_compression):
                # A lambda, because DDP checks a hook's annotations, which are strings here.
                replicated.register_comm_hook(None, lambda _, bucket: mean_of_rounded(number_type, bucket))
            self._module = replicated
        optimizer = build_optimizer(module, config.optimizer)
        super().__init__(
            self._module,
            optimizer,
            config,
            copies=worker.world_size,
            copy=worker.rank,
        )

    def forward_backward(self, batches: MicroBatches, total_label_tokens: int) -> Tensor:
        # DDP averages over ranks; the loss is a sum over ranks: multiply by their number.
        scale = self.loss_scale.value * self._worker.world_size / total_label_tokens
        loss_sum = torch.zeros((), device=self._worker.device)
        for number, batch in enumerate(batches, start=1):
            with self._synchronise(number == len(batches)):
                with autocast(self._config.precision, self._worker.device):
                    loss = self._module(**batch.to(self._worker.device))
                (loss * scale).backward()
            loss_sum += loss.detach()
        return loss_sum / total_label_tokens

    def forward_loss(self, batch: PackedBatch) -> Tensor:
        return loss_without_gradients(self._module, batch, self._worker.device, self._config.precision)

    def step(self, rate_factor: float) -> StepResult:
        # Gradients are views of DDP's buckets. If released, they would be allocated again beside the buckets.
        most, scale = self._config.clip_grad_norm, self.loss_scale
        return self.followed(
            clip_and_step(self._module, self._optimizer, scale, most, rate_factor, keep_gradients=True)
        )

    def _synchronise(self, last: bool) -> contextlib.AbstractContextManager[None]:
        """Synchronise gradients in the last micro-batch of a step only."""
        if last or not isinstance(self._module, DistributedDataParallel):
            return contextlib.nullcontext()
        return self._module.no_sync()


def mean_of_rounded(number_type: torch.dtype, bucket: dist.GradBucket) -> Future[Tensor]:
    """DDP communication hook: a bucket's mean over ranks, sent as `number_type`.

    It has no state, so resuming is exact. torch's own bf16 hook needs a GPU.
    """
    gradients = bucket.buffer()
    rounded = gradients.div_(dist.get_world_size()).to(number_type)

    def widen(sent: Future[list[Tensor]]) -> Tensor:
        return gradients.copy_(sent.value()[0])

    return dist.all_reduce(rounded, async_op=True).get_future().then(widen)
