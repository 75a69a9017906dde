"""A run on one rank with its data open, which every later part of the setup starts from."""

from __future__ import annotations

from dataclasses import dataclass

from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.data.prefixes.separate_cost import cost_text, separate_cost
from vlmpipe.trainer.data.prefixes.sharing import resolved_sharing
from vlmpipe.trainer.distributed.data_parallel_rank import DataParallelRank, replica_of, require_divisible
from vlmpipe.trainer.distributed.process import ProcessContext
from vlmpipe.trainer.hooks.features import features_of
from vlmpipe.trainer.models.base import Family
from vlmpipe.trainer.models.registry import family_of
from vlmpipe.trainer.setup.data import TrainingData, open_data
from vlmpipe.trainer.setup.shared_prefix import sharing_obstacle


@dataclass(frozen=True)
class OpenRun:
    """A run on one rank: its settings, model family and data, and the place of the rank."""

    requested: JobConfig  # the settings that checkpoints record
    job: JobConfig  # the settings that training has: with data.share_prefix on or off in place of auto
    family: Family
    data: TrainingData
    replica: DataParallelRank
    worker: ProcessContext

    @property
    def reads_images(self) -> bool:
        """Return whether this rank reads images of samples: its part of the model encodes them."""
        return self.replica.takes_images and not self.data.cached


def open_run(requested: JobConfig, worker: ProcessContext) -> OpenRun:
    """The run with its data open, once this machine has what the run file's features need.

    Raises UserError or ConfigError for what machine, ranks or data lack.
    """
    job, obstacle = resolved_sharing(requested, lambda: sharing_obstacle(requested.model))
    for feature in features_of(job):
        feature.require(worker.device)
    replica = replica_of(job.train, worker)
    require_divisible(job, replica)
    if worker.is_first:
        for name, origin in job.model.origins().items():
            print(f"train: model.{name}: {origin}", flush=True)
    data = open_data(job)
    if obstacle and worker.is_first:
        print(f"train: {_separate_images_text(job, data, obstacle)}", flush=True)
    return OpenRun(requested, job, family_of(job.model), data, replica, worker)


def _separate_images_text(job: JobConfig, data: TrainingData, obstacle: str) -> str:
    """Say why samples do not share the prefix of their images, and what that costs."""
    in_pairs = job.train.in_pairs
    cost = cost_text(separate_cost(data.train, in_pairs=in_pairs), in_pairs=in_pairs)
    return f"data.share_prefix auto computes images for each sample: found {obstacle}; {cost}"
