"""Usage of a training is that of all its starts, those that were killed included."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlmpipe.trainer.monitoring.usage import StartUsage, UsageLog, read_usage, total_of
from vlmpipe.trainer.storage.local import LocalStorage


def test_a_start_that_was_killed_counts_until_it_was_last_seen(memory: Path) -> None:
    store = LocalStorage(memory)
    killed = UsageLog(store, 1, first_step=0)
    killed._file._began_s = -1e9  # the next write is due
    killed.note(45, tokens=4500, label_tokens=450, checkpoint_stall_s=1.5)
    assert killed._file._thread
    killed._file._thread.join()
    last = UsageLog(store, 2, first_step=40)
    last.note(60, tokens=2000, label_tokens=200, checkpoint_stall_s=0.5)
    total = last.close()
    assert (total.starts, total.steps_made, total.steps_repeated) == (2, 65, 5)
    assert (total.tokens, total.label_tokens, total.checkpoint_stall_s) == (6500, 650, 2.0)
    assert [one.start for one in read_usage(store)] == [1, 2]
    assert total.seconds == pytest.approx(sum(one.seen_s - one.began_s for one in read_usage(store)))


def test_starts_that_resume_never_gave_up_are_another_training(memory: Path) -> None:
    store = LocalStorage(memory)
    UsageLog(store, 1, first_step=0).close()
    fresh = UsageLog(store, 2, first_step=0, since=2)
    fresh.note(5, tokens=10)
    assert (fresh.close().starts, fresh.close().tokens) == (1, 10)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10)), min_size=1, max_size=6))
def test_steps_made_are_those_of_the_run_and_those_made_again(moves: list[tuple[int, int]]) -> None:
    """Each start makes some steps, and the next begins as many before its end."""
    starts, reached, lost = list[StartUsage](), 0, 0
    for number, (made, back) in enumerate(moves, start=1):
        first = max(0, reached - back)
        lost += reached - first
        reached = first + made
        starts.append(StartUsage(number, 0.0, 1.0, first, reached))
    total = total_of(starts)
    assert total.steps_repeated == lost and total.steps_made == reached + lost
