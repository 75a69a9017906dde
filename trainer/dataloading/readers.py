"""Opens a run's data and features for reading, and prefetches remote shards of both."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.data.prefetch import GROUPS_AHEAD, Needs, ShardPrefetcher, ShardSchedule
from vlmpipe.trainer.data.sampler import PackedBatchSampler
from vlmpipe.trainer.data.shards.disk_cache import ShardCache, open_shards
from vlmpipe.trainer.data.shards.index import SplitIndex
from vlmpipe.trainer.data.shards.prepared_files import open_prepared
from vlmpipe.trainer.data.shards.tar import ShardReader
from vlmpipe.trainer.data.shards.verified_files import DataShards, ShardFiles, ShardSet
from vlmpipe.trainer.feature_cache.reader import FeatureReader, FeatureShards


@dataclass(frozen=True)
class Readers:
    """A run's samples, and its cached features where it uses them."""

    data: ShardFiles
    features: FeatureReader | None

    @property
    def samples(self) -> ShardReader:
        return ShardReader(self.data)

    def require_room(self, split: SplitIndex) -> None:
        """Raise ConfigError when a shard of the split is larger than the cache, so that it cannot be read whole."""
        if isinstance(self.data, ShardCache):
            self.data.require_room(split.shards)

    def fetch_ahead(
        self,
        split: SplitIndex,
        sequence: PackedBatchSampler,
        end_step: int,
        shuffle_shards: int,
        *,
        has_ranges: bool = False,
    ) -> list[ShardPrefetcher]:
        """Prefetchers of the remote shards of the steps up to `end_step`; `has_ranges`: of features alone."""
        prefetchers = []
        for files, names, needs, group_shards in self._remote(split, shuffle_shards):
            if has_ranges and files is self.data:
                continue
            schedule = ShardSchedule(names, needs, sequence, end_step)
            prefetchers.append(ShardPrefetcher(files, schedule, group_shards=group_shards))
        return prefetchers

    def _remote(self, split: SplitIndex, shuffle_shards: int) -> Iterator[tuple[ShardCache, list[str], Needs, int]]:
        if isinstance(self.data, ShardCache):
            yield self.data, split.shards, Needs.one_each(split.shard_numbers), shuffle_shards
        if self.features and isinstance(self.features.files, ShardCache):
            # Features are stored in the order of the data, so a group of data shards needs a few shards of features.
            shards = self.features.shards
            groups = max(1.0, len(split.shards) / shuffle_shards)
            yield self.features.files, shards.names, shards.needs(split), math.ceil(len(shards.names) / groups) + 1


def open_readers(job: JobConfig, *, set_aside_bytes: int = 0) -> Readers:
    """Open the run's prepared data and features, which share the cache of remote shards by their sizes.

    Raises ConfigError for features in a shard larger than the cache; see `require_room` for data.
    """
    pointers = job.pointers()
    data, cache_gib = DataShards(open_prepared(pointers.prepared_uri)), job.data.shard_cache_gib
    features = FeatureShards(pointers.features_uri) if pointers.features != "off" else None
    sets: list[ShardSet] = [data, features] if features else [data]
    files, *cached = open_shards(*sets, cache_gib=cache_gib, set_aside_bytes=set_aside_bytes, in_part=[data])
    return Readers(files, FeatureReader(features, *cached) if features else None)


def warnings(ahead: list[ShardPrefetcher]) -> Iterator[str]:
    """Warnings about a cache that is too small to fetch each shard once and in time."""
    for reader in ahead:
        if reader.cache.num_fitting < reader.max_shards:
            yield (
                f"the cache holds {reader.cache.num_fitting} shards of {reader.cache.shards.kind}, {GROUPS_AHEAD} "
                f"groups of data.shuffle_shards are {reader.max_shards}: shards will be fetched late or more than "
                "once; raise data.shard_cache_gib"
            )
