"""Data-parallel ranks, where several processes train on the same packed sequences: tensor, pipeline and context
parallelism."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.config.train import TrainConfig
from vlmpipe.trainer.distributed.process import ProcessContext
from vlmpipe.trainer.errors import ConfigError

SEED_MASK = (1 << 64) - 1  # numpy takes no negative seeds


@dataclass(frozen=True)
class DataParallelRank:
    """The group of processes that this one belongs to, which train on the same packed sequences.

    Tensor or context parallelism is innermost, so that it stays inside a node, then groups, then pipeline stages: rank
    = (stage x groups + group) x innermost + place in it.
    """

    index: int
    count: int  # groups in the job
    leads: bool  # this is the group's first process, which counts its sequences
    takes_images: bool  # this process is in the first pipeline stage
    part: int = 0  # of its sequences' tokens, whose labels this process has
    parts: int = 1

    def dropout_seed(self, seed: int, step: int) -> int:
        """Seed of the masks from an optimizer step on: equal for processes with the same tokens and no others."""
        drawn_from = [seed & SEED_MASK, step, self.index * self.parts + self.part]
        return int(np.random.SeedSequence(drawn_from).generate_state(1, np.uint64)[0])


def replica_of(config: TrainConfig, worker: ProcessContext) -> DataParallelRank:
    """Raises ConfigError when the job's ranks do not divide into groups."""
    tensor, stages, context = config.tensor_parallel, config.pipeline_parallel, config.context_parallel
    if worker.world_size % config.sequence_ranks or worker.local_world_size % tensor:
        raise ConfigError(
            f"train.tensor_parallel {tensor} x train.pipeline_parallel {stages} x train.context_parallel {context} "
            f"do not divide {worker.world_size} processes, {worker.local_world_size} on a node",
            expected="a number of processes that is a multiple of all, with tensor parallelism inside a node",
        )
    innermost = tensor * context
    count = worker.world_size // config.sequence_ranks
    index = worker.rank // innermost % count
    is_first_stage = worker.rank // (innermost * count) == 0
    leads = worker.rank % innermost == 0 and is_first_stage
    part = worker.rank % context
    return DataParallelRank(index, count, leads, takes_images=is_first_stage, part=part, parts=context)


def require_divisible(job: JobConfig, replica: DataParallelRank) -> None:
    """Every rank runs the same number of equal micro-batches."""
    settings = job.train
    if settings.global_batch_size % (settings.micro_batch_size * replica.count):
        ranks = settings.sequence_ranks
        copies = "processes" if ranks == 1 else f"groups of {ranks} processes with the same sequences,"
        raise ConfigError(
            f"train.global_batch_size {settings.global_batch_size} does not divide over {replica.count} {copies} "
            f"with train.micro_batch_size {settings.micro_batch_size}",
            expected=f"a multiple of {settings.micro_batch_size * replica.count}",
        )
    if job.data.sequence_length % settings.context_parallel:
        raise ConfigError(
            f"train.context_parallel {settings.context_parallel} does not divide data.sequence_length "
            f"{job.data.sequence_length}",
            expected="tokens of a sequence that are a multiple of it",
        )
    if settings.sequence_parallel and job.data.sequence_length % settings.tensor_parallel:
        raise ConfigError(
            f"train.sequence_parallel: {settings.tensor_parallel} ranks cannot share data.sequence_length "
            f"{job.data.sequence_length}",
            expected="tokens of a sequence that are a multiple of train.tensor_parallel",
        )
