"""Warnings about checkpoints that stay unfinished."""

from __future__ import annotations

import pytest

from vlmpipe.trainer.external.checkpoints.unfinished import WARN_S, Unfinished


@pytest.mark.parametrize("ended", [False, True])
def test_one_that_stays_unfinished_is_said_once_after_a_minute_or_at_the_end(ended: bool) -> None:
    said, now = list[str](), [0.0]
    unfinished = Unfinished(said.append, clock=lambda: now[0])
    for _ in range(3):
        unfinished.note("global_step20", 0, "no file `latest` names it")
        unfinished.tell(10, ended=ended)
        assert len(said) == ended
    now[0] = WARN_S
    for _ in range(2):
        unfinished.note("global_step20", 0, "no file `latest` names it")
        unfinished.tell(10, ended=ended)
    (text,) = said
    assert "global_step20 is not committed: no file `latest` names it" in text and "Every process must" in text


def test_one_that_is_finished_in_time_or_older_than_the_newest_copy_is_not_said() -> None:
    said, now = list[str](), [0.0]
    unfinished = Unfinished(said.append, clock=lambda: now[0])
    unfinished.note("global_step20", 0, "unfinished")
    unfinished.tell(0, ended=False)
    unfinished.tell(20, ended=False)  # finished meanwhile
    now[0] = 2 * WARN_S
    unfinished.note("global_step20", 0, "unfinished")
    unfinished.tell(20, ended=True)
    unfinished.note("global_step30", 0, "begun just now")
    unfinished.tell(20, ended=False)
    assert said == []


def test_a_large_one_that_is_still_written_is_not_said() -> None:
    said, now = list[str](), 0.0
    unfinished = Unfinished(said.append, clock=lambda: now)
    for size in range(5):
        unfinished.note("checkpoint-20", 0, "it has no trainer_state.json", size)
        unfinished.tell(0, ended=False)
        now += 0.9 * WARN_S
    assert said == []
    unfinished.note("checkpoint-20", 0, "it has no trainer_state.json", 4)
    now += WARN_S
    unfinished.tell(0, ended=False)
    assert len(said) == 1
