"""By which calculation samples of a bucket are read by range."""

from __future__ import annotations

from dataclasses import replace

import pytest

from vlmpipe.trainer.data.shards.shard_reading import ShardReading

# 100 GB of a million samples, read once by one machine whose disk holds them all.
ONE = ShardReading(
    shards=1000,
    shard_bytes=1e8,
    sample_bytes=1e5,
    samples_drawn=1e6,
    epochs=1.0,
    steps=2000,
    groups=8,
    machine_ranks=8,
    cache_bytes=4e11,
    shuffle_shards=64,
)


@pytest.mark.parametrize(
    ("case", "how"),
    [
        (ONE, "whole"),
        (replace(ONE, groups=32), "whole"),  # ranges are less, but not clearly
        (replace(ONE, groups=80), "whole"),
        (replace(ONE, groups=88), "ranges"),
        (replace(ONE, groups=11), "whole"),  # as many ranks: the 8 of a machine ask for the same samples
        (replace(ONE, groups=88, samples_drawn=3e6, epochs=3.0), "whole"),  # the disk keeps what is read thrice
        (replace(ONE, groups=64), "whole"),
        (replace(ONE, groups=64, sample_bytes=2e3), "ranges"),  # cached features leave images unread
        (replace(ONE, cache_bytes=2 * 64e8), "whole"),  # two groups
        (replace(ONE, cache_bytes=32e8), "ranges"),  # half of one
        (replace(ONE, shuffle_shards=1, cache_bytes=1e8), "whole"),  # a shard
        (replace(ONE, shuffle_shards=1, cache_bytes=1e8 - 1), "ranges"),  # no shard can be read whole
    ],
)
def test_ranges_are_taken_where_they_take_clearly_less_time(case: ShardReading, how: str) -> None:
    assert case.best() == how


def test_few_machines_whose_saving_is_small_read_whole_shards() -> None:
    case = replace(ONE, groups=32)
    assert case.ranges().weight < case.whole().weight and case.best() == "whole"
