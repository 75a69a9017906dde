"""The planner's order of passes beside torch's own schedules."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining import ScheduleInterleaved1F1B

from vlmpipe.planner.memory.pipeline_schedule import operations
from vlmpipe.trainer.sizing.pipeline_partition import schedule_passes


@given(st.integers(2, 6), st.integers(2, 4), st.integers(1, 20))
def test_interleaved_passes_come_in_torchs_order(ranks: int, virtual: int, micro_batches: int) -> None:
    passes = schedule_passes(micro_batches, ranks, virtual)
    schedule = object.__new__(ScheduleInterleaved1F1B)  # which would need stages, and processes for them
    schedule.pp_group_size, schedule.n_local_stages, schedule._n_microbatches = ranks, virtual, passes
    schedule.number_of_rounds = passes // ranks
    schedule.microbatches_per_round = passes // schedule.number_of_rounds
    for rank in range(ranks):
        theirs = [one for one in schedule._calculate_single_rank_operations(rank) if one is not None]
        kinds = {"FORWARD": "forward", "FULL_BACKWARD": "backward"}
        expected = [(kinds[one.computation_type.name], one.stage_index // ranks) for one in theirs]
        assert list(operations(rank, ranks, virtual, micro_batches)) == expected


@given(st.integers(2, 6), st.data())
def test_one_stage_a_rank_holds_as_many_micro_batches_as_there_are_stages_from_it_on(
    ranks: int, data: st.DataObject
) -> None:
    rank, micro_batches = data.draw(st.integers(0, ranks - 1)), data.draw(st.integers(1, 12))
    held, most = 0, 0
    for kind, stage in operations(rank, ranks, 1, micro_batches):
        assert stage == 0
        held += 1 if kind == "forward" else -1
        most = max(most, held)
    assert (held, most) == (0, min(ranks - rank, micro_batches))


@pytest.mark.parametrize("virtual", [1, 2, 3])
def test_each_stage_has_as_many_passes_of_each_kind(virtual: int) -> None:
    found = Counter(operations(1, 3, virtual, 6))
    assert found == {(kind, stage): 6 for kind in ("forward", "backward") for stage in range(virtual)}
