"""Data-parallel ranks, where tensor or pipeline parallelism has several processes share one copy of the model."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.config.train import TrainConfig
from trainer.distributed.process import ProcessContext
from trainer.errors import ConfigError


@dataclass(frozen=True)
class DataParallelRank:
    """The copy of the model that this process belongs to. Its processes train on the same packed sequences.

    Tensor parallelism is innermost, so that it stays inside a node, then copies, then pipeline stages: rank = (stage x
    copies + copy) x tensor_parallel + tensor rank.
    """

    index: int
    count: int  # copies in the job
    leads: bool  # this is the copy's first process, which counts its sequences
    takes_images: bool  # this process is in the first pipeline stage


def replica_of(config: TrainConfig, worker: ProcessContext) -> DataParallelRank:
    """Raises ConfigError when the job's ranks do not divide into copies."""
    tensor, stages = config.tensor_parallel, config.pipeline_parallel
    if worker.world_size % config.model_ranks or worker.local_world_size % tensor:
        raise ConfigError(
            f"train.tensor_parallel {tensor} x train.pipeline_parallel {stages} do not divide {worker.world_size} "
            f"processes, {worker.local_world_size} on a node",
            expected="a number of processes that is a multiple of both, with tensor parallelism inside a node",
        )
    count = worker.world_size // config.model_ranks
    index = worker.rank // tensor % count
    is_first_stage = worker.rank // (tensor * count) == 0
    leads = worker.rank % tensor == 0 and is_first_stage
    return DataParallelRank(index, count, leads, takes_images=is_first_stage)
