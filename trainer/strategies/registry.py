"""Builds the strategy that `train.strategy` names."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

from vlmpipe.trainer.config.train import TrainConfig
from vlmpipe.trainer.distributed.process import ProcessContext
from vlmpipe.trainer.models.base import ShardingUnits
from vlmpipe.trainer.strategies.base import Strategy

if TYPE_CHECKING:
    from torch import nn


def build_strategy(config: TrainConfig, module: nn.Module, blocks: ShardingUnits, worker: ProcessContext) -> Strategy:
    """Build the strategy. Imports are local: DeepSpeed alone takes a second."""
    if config.context_parallel > 1:
        from vlmpipe.trainer.strategies.context_parallel import share_sequences

        share_sequences(module, config.context_parallel, worker)
    match config.strategy:
        case "ddp" if config.precision != "bf16":
            from vlmpipe.trainer.strategies.ddp import Ddp

            return Ddp(config, module, worker)
        case "ddp" | "fsdp" | "hsdp":
            from vlmpipe.trainer.strategies.fsdp import Fsdp

            return Fsdp(config, module, blocks, worker)
        case "zero1" | "zero2" | "zero3":
            from vlmpipe.trainer.strategies.deepspeed.engine import Zero

            return Zero(config, module, blocks, worker, stage=int(config.strategy[-1]))
        case "tp":
            from vlmpipe.trainer.strategies.tensor_parallel.strategy import TensorParallel

            return TensorParallel(config, module, blocks, worker)
        case "pp" | "tp+pp+dp":
            from vlmpipe.trainer.strategies.pipeline_parallel.strategy import Pipeline

            return Pipeline(config, module, blocks, worker)


def strategy_names() -> list[str]:
    """All strategies; the equality tests run over them."""
    return sorted(get_args(TrainConfig.model_fields["strategy"].annotation))
