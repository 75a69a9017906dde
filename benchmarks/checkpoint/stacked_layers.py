"""A stack of square layers in the place of a model, trained for real, with a store to save to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from vlmpipe.trainer.checkpoint.async_saver import CheckpointSaver
from vlmpipe.trainer.checkpoint.attempts import claim_attempt
from vlmpipe.trainer.checkpoint.failed_saves import FailedSaves
from vlmpipe.trainer.checkpoint.retention import Retention
from vlmpipe.trainer.config.optimizer import OptimizerConfig
from vlmpipe.trainer.config.train import TrainConfig
from vlmpipe.trainer.dataloading.batches import PackedBatch
from vlmpipe.trainer.distributed.process import ProcessContext
from vlmpipe.trainer.records.commit import CommitRecord
from vlmpipe.trainer.storage.local import LocalStorage
from vlmpipe.trainer.strategies.ddp import Ddp

RECORD = CommitRecord(
    attempt=1, epoch=0, step=0, sequences_consumed=0, world_size=1, num_nodes=1, strategy="ddp",
    checkpoint_format="dcp", plan_sha256="", model_sha256="", tower_sha256="", versions={},
)  # fmt: skip
WIDTH = 1024  # a layer is 4 MiB of weights, three times that with Adam's moments
TRAIN = TrainConfig(
    global_batch_size=1, optimizer=OptimizerConfig(learning_rate=1e-3), precision="fp32", clip_grad_norm=0.0
)


class Layers(nn.Module):
    """The stack. Its output is a sum, which stands for a loss."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.model = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, images: Tensor, **_: Tensor) -> Tensor:
        for layer in self.model:
            images = layer(images)
        return images.sum()


class Trained:
    """A strategy that has made a step, so that the optimizer has its state."""

    def __init__(self, layers: int, folder: Path, worker: ProcessContext, *, width: int = WIDTH) -> None:
        torch.manual_seed(0)
        self._width, self.module = width, Layers(layers, width)
        self.strategy, self.worker = Ddp(TRAIN, self.module, worker), worker
        self.store = LocalStorage(folder)
        claim_attempt(self.store, fresh=False)
        self.step()

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The strategy's own."""
        return self.strategy._optimizer

    def step(self) -> None:
        """One training step."""
        none = torch.zeros(1, dtype=torch.int64)
        self.strategy.forward_backward([PackedBatch(none, none, none, none, torch.ones(1, self._width))], 1)
        self.strategy.step(1.0)

    def saver(self, *, async_save: bool, on_commit: Callable[[str], None] = lambda name: None) -> CheckpointSaver:
        """A saver that keeps one checkpoint."""
        failures = FailedSaves(limit_s=0.0)  # the first one ends it
        return CheckpointSaver(
            self.store, self.strategy, self.worker, Retention(1), failures, async_save=async_save, on_commit=on_commit
        )
