"""The loader of this rank's packed sequences and its source of images."""

from __future__ import annotations

from collections.abc import Iterator

from vlmpipe.trainer.data.loader import PackedLoader
from vlmpipe.trainer.data.shards.disk_cache import ShardCache
from vlmpipe.trainer.data.shards.index import SplitIndex
from vlmpipe.trainer.data.shards.sample_ranges import SampleRanges, shard_versions
from vlmpipe.trainer.data.shards.shard_reading import ShardReading
from vlmpipe.trainer.dataloading.batches import ImageSource, cached_images, image_layouts, online_images
from vlmpipe.trainer.dataloading.readers import Readers, open_readers, warnings
from vlmpipe.trainer.errors import print_warning
from vlmpipe.trainer.feature_cache.reader import FeatureReader
from vlmpipe.trainer.hooks.features import features_of
from vlmpipe.trainer.models.image_processor import image_preparer
from vlmpipe.trainer.setup.data import TrainingData
from vlmpipe.trainer.setup.model import BuiltModel
from vlmpipe.trainer.setup.open_run import OpenRun
from vlmpipe.trainer.sizing.checkpoint_size import node_bytes
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.base import in_bucket


def build_loader(run: OpenRun, built: BuiltModel) -> tuple[Readers, PackedLoader]:
    """Readers of samples and features, with shards fetched ahead, and the loader of this rank's packed sequences."""
    job, data, worker = run.job, run.data, run.worker
    of_checkpoints = node_bytes(
        built.num_trainable,
        job.train,
        nodes=worker.num_nodes,
        in_bucket=in_bucket(job.run.run_uri),
    )
    readers = open_readers(job, set_aside_bytes=of_checkpoints)  # they keep their room on this node
    ranges = _sample_ranges(run, readers)
    ahead = readers.fetch_ahead(
        data.train, data.sampler, data.total_steps, job.data.shuffle_shards, has_ranges=ranges is not None
    )
    if worker.is_first:
        doubts = [line for feature in features_of(job) for line in feature.warnings(job.train, data.total_steps)]
        for warning in (*warnings(ahead), *_refused_by_evaluation(data, readers), *doubts):
            print_warning(warning)
    loader = PackedLoader(
        data.train, data.sampler, data.chat, readers.samples, images=run.reads_images, ahead=ahead, ranges=ranges
    )
    return readers, loader


def _refused_by_evaluation(data: TrainingData, readers: Readers) -> Iterator[str]:
    """A warning where training reads by range what evaluation, after it, reads as whole shards."""
    if isinstance(readers.data, ShardCache) and (shard := readers.data.too_large(data.index.split("eval").shards)):
        yield (
            f"shard {shard} is larger than the cache for shards, which evaluation reads whole: it would be refused "
            "after training; raise data.shard_cache_gib or lower data.shard_samples"
        )


def _sample_ranges(run: OpenRun, readers: Readers) -> SampleRanges | None:
    """Reads training samples by range, where the run file says so or `auto` finds it best; None: whole shards."""
    job, data, worker = run.job, run.data, run.worker
    how = job.data.shard_reading
    if not isinstance(readers.data, ShardCache):
        if how == "ranges" and worker.is_first:
            print_warning("data.shard_reading=ranges has no effect: the prepared data is in a folder of this machine")
        return None
    of_epoch = data.sampler.num_steps(1)
    epochs = data.total_steps / max(1, of_epoch)
    case = ShardReading(
        shards=len(data.train.shards),
        shard_bytes=readers.data.mean_bytes,
        sample_bytes=data.train.mean_stored_bytes(images=run.reads_images),
        samples_drawn=data.sampler.totals(0).samples * epochs,
        epochs=epochs,
        steps=data.total_steps,
        groups=run.replica.count,
        machine_ranks=worker.local_world_size,
        cache_bytes=readers.data.limit_bytes,
        shuffle_shards=job.data.shuffle_shards,
    )
    if how == "auto":  # a shard above the cache cannot be read whole
        how = "ranges" if readers.data.too_large(data.train.shards) else case.best()
    if how == "whole":
        readers.require_room(data.train)
        return None
    if worker.is_first:
        print(f"train: {case.text()} (data.shard_reading: {job.data.shard_reading})", flush=True)
    return _ranges_of(data.train, run)


def validation_ranges(run: OpenRun, readers: Readers) -> SampleRanges | None:
    """Reads validation samples by range where a shard of theirs is larger than the cache and may not be read whole.

    None: whole shards. Every sample of them is used, so that ranges would read as many bytes by more requests.
    """
    split = run.data.index.split("eval")
    if not isinstance(readers.data, ShardCache) or not readers.data.too_large(split.shards):
        return None
    if run.job.data.shard_reading == "whole":
        readers.require_room(split)
    return _ranges_of(split, run)


def _ranges_of(split: SplitIndex, run: OpenRun) -> SampleRanges:
    storage = open_storage(run.data.pointers.prepared_uri)
    versions = shard_versions(storage, split.shards)
    patience_s = run.job.checkpoint.max_s_without_commit
    return SampleRanges(split, storage, versions, images=run.reads_images, patience_s=patience_s)


def image_source_of(run: OpenRun, features: FeatureReader | None, tower_sha256: str) -> ImageSource:
    model = run.job.model
    if features is not None:
        features.shards.require_tower(tower_sha256)
    if not run.replica.takes_images:
        return image_layouts(model)
    return cached_images(features, model) if features else online_images(image_preparer(model))
