"""What the data path gains: packing, reading, cached features, preparation. `make bench-data`"""

from __future__ import annotations

import sys

from benchmarks.support.suite import Part, Suite

SUITE = Suite(
    "Data path",
    [
        Part("packing", "data.packing", 90, "best-fit packing beside padding and greedy packing"),
        Part("reading", "data.reading", 120, "an epoch from tar shards, beside webdataset; with and without decoding"),
        Part("tokens", "data.tokens", 60, "tokens and labels in a chat template, beside tokenizing alone"),
        Part("images", "data.images", 90, "cached features beside decoding; decoding beside Pillow by hand"),
        Part("video", "data.video", 40, "frames of a video beside bare PyAV"),
        Part("preparing", "data.preparing", 60, "pixel values of images, beside the processor of the library"),
        Part("loading", "data.image_threads", 40, "a rank's loader in several threads beside one", default=False),
        Part("hf-threads", "data.image_threads", 30, "images of family hf in two threads beside one", default=False),
        Part("encoding", "data.encoding", 60, "the encoding job beside the sum of its parts"),
        Part("accumulation", "data.accumulation", 30, "host memory of a step's images, by its micro-batches"),
        Part("pictures", "data.pictures", 20, "preparation of a picture, and its signature, beside Pillow's decoding"),
        Part(
            "turns",
            "data.turns",
            120,
            "preparing a turn of conversations of 128 turns, beside ordinary ones",
            default=False,
        ),
        Part(
            "near-duplicates",
            "data.copies.near_duplicates",
            30,
            "images that look alike by nature; copies that are found",
            default=False,
        ),
        Part(
            "audit-scale",
            "data.copies.audit_scale",
            600,
            "memory and time in which data audit compares 10,000 and 100,000 images, exact and by the index",
            default=False,
        ),
        Part(
            "mixture",
            "data.mixture",
            150,
            "preparing ten sources beside a single one of the same records",
            default=False,
        ),
        Part("preparation", "data.preparation", 180, "CPU time of a sample; two processes beside one", default=False),
        Part(
            "preparation-scale",
            "data.preparation",
            3600,
            "a million records beside 20,000: time and memory",
            default=False,
        ),
        Part("scale", "scale.index_memory", 400, "opening the index of 0.1, 1 and 10 million samples", default=False),
        Part("duplicates", "scale.duplicates", 600, "duplicates, ids and groups of 10 million samples", default=False),
        Part("manifest", "scale.manifests", 120, "100,000 shards: opening, listing and verifying", default=False),
        Part(
            "preparation-tasks",
            "scale.preparation_tasks",
            7200,
            "0.1, 1 and 10 million texts over eight tasks, or --size: memory and time of each step",
            default=False,
        ),
        Part(
            "merge",
            "scale.merge",
            900,
            "0.1, 1 and 10 million texts, or --size: memory of prepare-data over chunks that are made for it",
            default=False,
        ),
        Part(
            "shared-plans",
            "scale.shared_plans",
            60,
            "packing plans once a machine, beside one of each rank",
            default=False,
        ),
        Part(
            "shard-reading",
            "scale.shard_reading",
            30,
            "requests and bytes of samples of a bucket: whole shards, by cache, beside ranges",
            default=False,
        ),
        Part("mixture-scale", "data.mixture", 1200, "the same with ten sources of texts", default=False),
    ],
    rounds=9,
)

if __name__ == "__main__":
    sys.exit(SUITE.main(__doc__))
