"""When which shard is needed next, beside a search through the plan of rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.data.shard_splits import sequence_of, split_of
from vlmpipe.trainer.data.packing import PackingPlan
from vlmpipe.trainer.data.prefetch import Needs, ShardSchedule
from vlmpipe.trainer.data.shards.disk_cache import NEVER


@settings(max_examples=30)
@given(
    needed=st.lists(st.lists(st.integers(0, 7), max_size=3), min_size=1, max_size=60),
    shuffle_shards=st.integers(1, 9),
    batch=st.integers(1, 5),
    end=st.integers(1, 40),
)
def test_schedule_gives_the_next_step_that_needs_a_shard(
    needed: list[list[int]], shuffle_shards: int, batch: int, end: int
) -> None:
    split = split_of([number // 8 for number in range(len(needed))], ["data"] * (1 + len(needed) // 8))
    sequence = sequence_of(split, shuffle_shards, batch)
    offsets = np.cumsum([0, *map(len, needed)])
    needs = Needs(offsets, np.array([number for numbers in needed for number in numbers], np.int64))
    schedule = ShardSchedule([f"shard-{number}" for number in range(8)], needs, sequence, end)

    def uses(step: int) -> set[int]:
        return {shard for sample in sequence.members(sequence.batch(step)) for shard in needed[sample]}

    for step in range(end):
        last = sequence.num_steps(sequence.batch(step).epoch + 2)  # of this epoch and the next
        expected = [
            next((later for later in range(step, min(end, last)) if shard in uses(later)), NEVER) for shard in range(8)
        ]
        assert schedule.next_uses(step).tolist() == expected


class LongEpochs:
    """Stands in for PackedBatchSampler: 16 sequences of a sample each, in epochs of 2^28 steps."""

    global_batch_size = 1

    def plan(self, epoch: int) -> PackingPlan:
        return PackingPlan(np.arange(17), np.arange(16), 1.0)

    def batch(self, step: int) -> Any:
        return SimpleNamespace(epoch=0)

    def num_steps(self, epochs: int) -> int:
        return epochs << 28


def test_shards_times_steps_may_exceed_32_bits() -> None:
    """The index has numbers of shards in 32 bits; 5,000 shards and 625,000 steps are one set of large samples."""
    needs, sequence = Needs.one_each(np.arange(16, dtype=np.int32)), LongEpochs()
    schedule = ShardSchedule([f"shard-{number}" for number in range(16)], needs, sequence, 1 << 28)  # type: ignore[arg-type]
    assert schedule.next_uses(0).tolist() == list(range(16))
