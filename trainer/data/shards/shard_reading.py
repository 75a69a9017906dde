"""Bytes and requests of training data in a bucket: shards fetched whole into a machine's cache, or samples by range.

Whole shards serve all ranks of a machine and later epochs; a range reads one sample and nothing beside it. So ranges
win where a machine uses few samples of a shard: with many machines, with cached features (which leave images unread),
or with a cache that does not hold the shards that are shuffled together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GROUPS_AHEAD = 2  # of data.shuffle_shards, that the cache holds so that each shard is fetched once
SHARED_TWICE = 1.1  # fetches of a shard in an epoch, of a cache of two groups: decision 0016
LOOKED_UP = 3  # requests of each rank for a shard's sidecar: is it there, is the shard, what does it say
# Bytes that take as long as a request: some 50 ms to a bucket's answer, of which a rank has 16 under way, at about
# 100 MB/s a rank.
REQUEST_BYTES = 256 << 10
# Whole shards over ranges, by their weight, from which ranges are taken unasked: REQUEST_BYTES is assumed, and whole
# shards, which lie on the machine's disk before they are needed, carry training through a slow minute of the bucket.
CLEARLY_LESS = 3

How = Literal["whole", "ranges"]


@dataclass(frozen=True)
class Traffic:
    """Bytes and requests of one machine in a run."""

    bytes: float
    requests: float

    @property
    def weight(self) -> float:
        """Bytes, with requests as the bytes that take the same time."""
        return self.bytes + self.requests * REQUEST_BYTES


@dataclass(frozen=True)
class ShardReading:
    """A training split in a bucket, and who reads it.

    Args:
        sample_bytes: mean of what is read of a sample.
        samples_drawn: in the run, each as often as it is drawn.
        steps: of the run.
        groups: of ranks that train on the same sequences: all ranks, without tensor, pipeline and context parallelism.
        cache_bytes: for data shards, on each machine.
    """

    shards: int
    shard_bytes: float  # of a shard
    sample_bytes: float
    samples_drawn: float
    epochs: float
    steps: int
    groups: int
    machine_ranks: int
    cache_bytes: float
    shuffle_shards: int

    @property
    def shards_fit(self) -> bool:
        """Return whether the cache holds a shard, without which none can be read whole."""
        return self.shard_bytes <= self.cache_bytes

    def whole(self) -> Traffic:
        """Whole shards. Every machine needs those of the whole global batch."""
        fetches = self._fetches()
        return Traffic(fetches * self.shard_bytes, fetches + LOOKED_UP * self.machine_ranks * self.shards)

    def ranges(self) -> Traffic:
        """Each rank's samples, one request each; those of a group ask for the same ones."""
        samples = self.samples_drawn / self.groups * self.machine_ranks
        return Traffic(samples * self.sample_bytes, samples)

    def best(self) -> How:
        """Return ranges where these take a third of the time of whole shards, or a shard does not fit the cache."""
        if not self.shards_fit:
            return "ranges"
        return "ranges" if CLEARLY_LESS * self.ranges().weight <= self.whole().weight else "whole"

    def text(self) -> str:
        """How samples are read by range, beside whole shards, for people."""
        ranges, whole, steps = self.ranges(), self.whole(), max(1, self.steps)
        return (
            f"samples are read by range: on each machine about {ranges.requests / steps:,.0f} requests and "
            f"{ranges.bytes / steps / 1e6:,.1f} MB a step; whole shards would be {whole.requests / steps:,.1f} "
            f"requests and {whole.bytes / steps / 1e6:,.1f} MB"
        )

    def _fetches(self) -> float:
        group = min(self.shards, self.shuffle_shards)
        if self.cache_bytes >= self.shards * self.shard_bytes:
            return self.shards * min(self.epochs, 1.0)
        if self.cache_bytes >= min(self.shards, GROUPS_AHEAD * group) * self.shard_bytes:
            return self.shards * self.epochs * SHARED_TWICE
        # Of the shards that a step needs, those that the cache does not hold are fetched again.
        samples = self.samples_drawn / max(1, self.steps)
        of_step = group * (1 - (1 - 1 / group) ** samples)
        held = min(1.0, self.cache_bytes / (group * self.shard_bytes))
        once = self.shards * self.epochs
        return once + max(0.0, of_step * self.steps - once) * (1 - held)
