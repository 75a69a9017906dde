"""Stand-ins for a split, and samplers over them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.data.sampler import PackedBatchSampler


def split_of(shard_numbers: list[int], shards: list[str]) -> Any:
    """The part of a split that samplers and shard schedules use."""

    class Split(SimpleNamespace):
        def __len__(self) -> int:
            return len(shard_numbers)

        def shown(self) -> Any:
            return self.image_count

    lengths = np.array([7 + 13 * number % 40 for number in range(len(shard_numbers))])
    return Split(
        name="train",
        tokens=lengths,
        image_count=np.ones_like(lengths),
        shards=shards,
        shard_numbers=np.array(shard_numbers),
    )


def sequence_of(
    split: Any, shuffle_shards: int, global_batch_size: int = 4, share_from: int | None = None
) -> PackedBatchSampler:
    data = DataConfig(
        source="unused.json", sequence_length=100, max_images_per_sequence=4, shuffle_shards=shuffle_shards
    )
    return PackedBatchSampler(split, data, seed=5, global_batch_size=global_batch_size, share_from=share_from)
