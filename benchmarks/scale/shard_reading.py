"""Part `shard-reading`: requests and bytes of epochs from a bucket, by whole shards in a cache and by ranges.

Counted by the stand-in for Cloud Storage on this machine, which says nothing of a network.
"""

from __future__ import annotations

import os
from dataclasses import replace

from benchmarks.support.report import Side
from benchmarks.support.suite import Bench
from tests.fakes.gcs.server import FakeGcs
from tests.support.data.bucket_shards import EPOCHS, SHUFFLE_SHARDS, BucketShards
from vlmpipe.trainer.data.shards.shard_reading import LOOKED_UP, ShardReading

CACHES = {"all shards": 1000, "two groups": 2 * SHUFFLE_SHARDS, "one group": SHUFFLE_SHARDS, "one shard": 1}


def shard_reading(bench: Bench) -> None:
    """Twelve shards in groups of two, read for two epochs by one rank."""
    os.environ["VLMPIPE_CACHE_DIR"] = str(bench.scratch)
    with FakeGcs(["bucket"]) as server:
        data = BucketShards(bench.scratch / "data", server)
        steps = data.sequence.num_steps(EPOCHS)
        local = data.rows(data.local, 0)
        sizes, largest = data.sizes, max(data.sizes.values())
        case = ShardReading(
            shards=len(sizes),
            shard_bytes=sum(sizes.values()) / len(sizes),
            sample_bytes=data.split.mean_stored_bytes(images=True),
            samples_drawn=sum(len(data.sequence.plan(epoch).members) for epoch in range(EPOCHS)),
            epochs=EPOCHS,
            steps=steps,
            groups=1,
            machine_ranks=1,
            cache_bytes=0.0,
            shuffle_shards=SHUFFLE_SHARDS,
        )

        def counted(name: str) -> None:
            sent = sum(size for file, size in server.downloads if file.endswith(".tar"))
            bench.report.figure("requests", name, "a step", Side("counted", [len(server.requests) / steps]))
            bench.report.figure("bytes of shards", name, "a step", Side("counted", [sent / steps]))

        for name, shards in CACHES.items():
            os.environ["VLMPIPE_CACHE_DIR"] = str(bench.scratch / name.replace(" ", "-"))
            (bench.scratch / name.replace(" ", "-")).mkdir(mode=0o700)
            _clear(server)
            rows = data.rows(data.remote, shards * largest)
            bench.report.require(rows == local, "samples are those of the folder")
            calculated = replace(case, cache_bytes=shards * largest).whole().requests - LOOKED_UP * len(sizes)
            fetched = sum(data.downloads().values())
            bench.report.predict("fetches of whole shards", f"cache for {name}", "", calculated, fetched)
            counted(f"whole shards, cache for {name}")
        for name, images in (("ranges", True), ("ranges, cached features", False)):
            loader = data.by_range(images=images)
            _clear(server)
            rows = data.rows_of(loader)
            bench.report.require(not images or rows == local, "samples are those of the folder")
            counted(name)


def _clear(server: FakeGcs) -> None:
    server.requests.clear()
    server.downloads.clear()
