"""The table of strategies."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from trainer.config.train import TrainConfig
from trainer.distributed.process import Worker
from trainer.models.base import Blocks
from trainer.strategies.base import Strategy

if TYPE_CHECKING:
    from torch import nn

    Build = Callable[[TrainConfig, nn.Module, Blocks, Worker], Strategy]


def build_strategy(config: TrainConfig, module: nn.Module, blocks: Blocks, worker: Worker) -> Strategy:
    """The strategy that `train.strategy` names. Imports are here: DeepSpeed alone takes a second."""
    return _table()[config.strategy](config, module, blocks, worker)


def strategy_names() -> list[str]:
    """Every entry of the table; the equality tests run over it."""
    return sorted(_table())


def _table() -> dict[str, Build]:
    def ddp(config: TrainConfig, module: nn.Module, blocks: Blocks, worker: Worker) -> Strategy:
        from trainer.strategies.ddp import Ddp

        return Ddp(config, module, worker)

    def fsdp(config: TrainConfig, module: nn.Module, blocks: Blocks, worker: Worker) -> Strategy:
        from trainer.strategies.fsdp import Fsdp

        return Fsdp(config, module, blocks, worker)

    def pipeline(config: TrainConfig, module: nn.Module, blocks: Blocks, worker: Worker) -> Strategy:
        from trainer.strategies.pipeline_parallel.strategy import Pipeline

        return Pipeline(config, module, blocks, worker)

    def tensor(config: TrainConfig, module: nn.Module, blocks: Blocks, worker: Worker) -> Strategy:
        from trainer.strategies.tensor_parallel.strategy import TensorParallel

        return TensorParallel(config, module, blocks, worker)

    def zero(stage: int) -> Build:
        def build(config: TrainConfig, module: nn.Module, blocks: Blocks, worker: Worker) -> Strategy:
            from trainer.strategies.deepspeed.engine import Zero

            return Zero(config, module, blocks, worker, stage=stage)

        return build

    table = {"ddp": ddp, "fsdp": fsdp, "hsdp": fsdp, "zero1": zero(1), "zero2": zero(2), "zero3": zero(3)}
    return {**table, "tp": tensor, "tp+fsdp": tensor, "pp": pipeline, "tp+pp+dp": pipeline}
