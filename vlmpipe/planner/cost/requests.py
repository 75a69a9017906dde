"""Requests of training to its buckets: those of a step and of a save, and what they cost."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vlmpipe.catalog.steps import load_steps
from vlmpipe.planner.scenario import Scenario
from vlmpipe.planner.steps.needs import RECORD_BYTES
from vlmpipe.trainer.data.shards.disk_cache import GIB, SHARE_OF_FREE_DISK
from vlmpipe.trainer.data.shards.shard_reading import LOOKED_UP, How, ShardReading
from vlmpipe.trainer.sizing.checkpoint_size import node_bytes
from vlmpipe.trainer.storage.base import in_bucket

if TYPE_CHECKING:
    from vlmpipe.catalog.prices import Prices

GB = 10**9
RANK_FILES = 3  # of a save: a rank's part of the state, and the states of its two random generators
SAVE_WRITES = 3  # what is where, COMMIT and LATEST
SAVE_LISTS = 4  # of folders and of what is deleted
KEPT_READS = 5  # of each checkpoint that is kept: COMMIT, a note that it is damaged, the number of starts
MANIFEST_READS = 1  # it is asked for again while a node is not done


@dataclass(frozen=True)
class BucketRequests:
    """Requests of a training job of its data and checkpoints. Metrics, progress and validation are not in it."""

    reading: How  # of training samples
    step: float  # class B, of all machines, a step
    save: float  # of all machines, a save
    class_a: float  # of the run
    class_b: float
    usd: float | None  # None: no price is known
    shards_fit: bool = True  # a shard is not larger than the cache, which could not read it whole


def bucket_requests(case: Scenario, prices: Prices) -> BucketRequests | None:
    """Requests of the training job; None where its bucket, or the amount of data, is not known."""
    config, load = case.config, case.load
    root = config.output.root_uri
    if not in_bucket(root) or not load.samples or not load.steps or config.train.trainer:
        return None
    reading, nodes = _reading(case, load.samples, load.steps), config.cluster.replica_count
    how: How = reading.best() if config.data.shard_reading == "auto" else config.data.shard_reading
    data = nodes * (reading.ranges() if how == "ranges" else reading.whole()).requests
    data += nodes * _feature_requests(case, load.samples)
    saves = math.ceil(load.steps / config.train.checkpoint_every_steps)
    ranks = nodes * reading.machine_ranks
    writes = RANK_FILES * ranks + nodes + SAVE_WRITES + SAVE_LISTS
    reads = MANIFEST_READS * nodes + KEPT_READS * (config.train.keep_checkpoints + 1)
    class_a, class_b = saves * writes, data + saves * reads
    price = prices.requests(root)
    usd = None if price is None else (class_a * price.class_a.usd + class_b * price.class_b.usd) / 1000
    return BucketRequests(how, data / load.steps, writes + reads, class_a, class_b, usd, reading.shards_fit)


def _reading(case: Scenario, samples: int, steps: int) -> ShardReading:
    """The training split, as `auto` of data.shard_reading sees it."""
    config, rates = case.config, load_steps().rates
    images_bytes = config.plan.sample_images * rates["image_bytes"]
    return ShardReading(
        shards=math.ceil(samples / config.data.shard_samples),
        shard_bytes=min(samples, config.data.shard_samples) * (images_bytes + RECORD_BYTES),
        sample_bytes=RECORD_BYTES + (0 if case.cached else images_bytes),
        samples_drawn=samples * case.load.passes,
        epochs=case.load.passes,
        steps=steps,
        groups=case.layout.data_parallel,
        machine_ranks=max(1, config.cluster.accelerator_count),
        cache_bytes=_cache_bytes(case),
        shuffle_shards=config.data.shuffle_shards,
    )


def _cache_bytes(case: Scenario) -> float:
    config = case.config
    if config.data.shard_cache_gib:
        return config.data.shard_cache_gib * GIB
    nodes = config.cluster.replica_count
    taken = node_bytes(case.shape.trainable_parameters, config.train, nodes=nodes, in_bucket=True)
    return SHARE_OF_FREE_DISK * max(0.0, config.cluster.boot_disk_size_gb * GB - taken)


def _feature_requests(case: Scenario, samples: int) -> float:
    """Requests of a machine for shards of cached features."""
    if not case.cached:
        return 0.0
    shards = math.ceil(samples * case.config.plan.sample_images / case.config.features.shard_images)
    return shards * (case.load.passes + LOOKED_UP * max(1, case.config.cluster.accelerator_count))
