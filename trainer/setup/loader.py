"""The loader of this rank's packed sequences and its source of images."""

from __future__ import annotations

from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.data.loader import PackedLoader
from vlmpipe.trainer.dataloading.batches import ImageSource, cached_images, no_images, online_images
from vlmpipe.trainer.dataloading.readers import Readers, open_readers, warnings
from vlmpipe.trainer.distributed.data_parallel_rank import DataParallelRank
from vlmpipe.trainer.distributed.process import ProcessContext
from vlmpipe.trainer.errors import print_warning
from vlmpipe.trainer.feature_cache.reader import FeatureReader
from vlmpipe.trainer.hooks.table import features_of
from vlmpipe.trainer.models.image_processor import image_preparer
from vlmpipe.trainer.setup.data import TrainingData
from vlmpipe.trainer.setup.model import BuiltModel
from vlmpipe.trainer.sizing.checkpoint_size import node_bytes
from vlmpipe.trainer.storage.base import in_bucket


def build_loader(
    job: JobConfig, data: TrainingData, built: BuiltModel, replica: DataParallelRank, worker: ProcessContext
) -> tuple[Readers, PackedLoader]:
    """Readers of samples and features, with shards fetched ahead, and the loader of this rank's packed sequences."""
    of_checkpoints = node_bytes(
        built.num_trainable,
        job.train,
        nodes=worker.num_nodes,
        in_bucket=in_bucket(job.run.run_uri),
    )
    readers = open_readers(job, set_aside_bytes=of_checkpoints)  # they keep their room on this node
    ahead = readers.fetch_ahead(data.train, data.sampler, data.total_steps, job.data.shuffle_shards)
    if worker.is_first:
        doubts = [line for feature in features_of(job) for line in feature.warnings(job.train, data.total_steps)]
        for warning in (*warnings(ahead), *doubts):
            print_warning(warning)
    images = replica.takes_images and not data.cached
    loader = PackedLoader(data.train, data.sampler, data.chat, readers.samples, images=images, ahead=ahead)
    return readers, loader


def image_source_of(
    job: JobConfig, features: FeatureReader | None, tower_sha256: str, replica: DataParallelRank
) -> ImageSource:
    if features is None:
        return online_images(image_preparer(job.model)) if replica.takes_images else no_images
    features.shards.require_tower(tower_sha256)
    return cached_images(features, job.model) if replica.takes_images else no_images
