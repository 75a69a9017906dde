"""A run before its first step, as a feature sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.data.chat.encode import Chat
from vlmpipe.trainer.data.loader import Float32Array
from vlmpipe.trainer.data.shards.index import Index
from vlmpipe.trainer.data.shards.tar import ShardReader
from vlmpipe.trainer.dataloading.batches import ImageSource
from vlmpipe.trainer.distributed.data_parallel_rank import DataParallelRank
from vlmpipe.trainer.distributed.process import ProcessContext
from vlmpipe.trainer.records.commit import CommitRecord
from vlmpipe.trainer.strategies.base import Strategy


@dataclass(frozen=True)
class BeforeTraining:
    """One rank's part of a run whose model is sharded, with the weights that training starts from."""

    job: JobConfig
    strategy: Strategy
    record: CommitRecord  # of a checkpoint at step 0
    chat: Chat
    index: Index
    samples: ShardReader
    images: ImageSource
    replica: DataParallelRank
    worker: ProcessContext


@runtime_checkable
class FindsReferences(Protocol):
    """A feature that trains on pairs. A hook beside those of `vlmpipe.trainer.hooks.feature.Feature`."""

    def references(self, run: BeforeTraining) -> Float32Array:
        """Find what pairs of the training split are compared with: (samples, 2), chosen and rejected. Collective."""
        ...
