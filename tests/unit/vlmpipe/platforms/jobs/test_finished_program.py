"""A job whose program has recorded its end and goes on is noticed, and no other one."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from vlmpipe.platforms.jobs.finished_program import LINGERS_S, LOOK_S, FinishedProgram
from vlmpipe.trainer.records.step import StepRecord
from vlmpipe.trainer.storage.local import LocalStorage
from vlmpipe.trainer.storage.records import write_record


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def looked(program: FinishedProgram, clock: Clock, seconds: float) -> bool:
    """Whether it lingers at some look within that time."""
    end_s, lingers = clock.now_s + seconds, False
    while clock.now_s < end_s:
        clock.now_s += LOOK_S / 2
        lingers = program.lingers()
    return lingers


def record(store: LocalStorage, state: str, ended_s: float) -> None:
    write_record(store, "steps/train.json", asdict(StepRecord("train", state, ended_s=ended_s)))


@pytest.mark.parametrize("state", ["done", "reused", "running", "failed", "stopped"])
def test_a_good_end_and_a_job_that_goes_on(tmp_path: Path, state: str) -> None:
    store, clock = LocalStorage(tmp_path), Clock()
    program = FinishedProgram(store, "train", clock=clock)
    assert not looked(program, clock, 2 * LINGERS_S), "no record yet"
    record(store, state, 0.0 if state == "running" else 5.0)
    assert not looked(program, clock, LINGERS_S - LOOK_S)
    assert looked(program, clock, 3 * LOOK_S) is (state in ("done", "reused"))


def test_a_program_that_is_started_again_has_its_whole_time_again(tmp_path: Path) -> None:
    store, clock = LocalStorage(tmp_path), Clock()
    program = FinishedProgram(store, "train", clock=clock)
    record(store, "done", 5.0)
    looked(program, clock, LINGERS_S - 2 * LOOK_S)
    record(store, "running", 0.0)
    looked(program, clock, 2 * LOOK_S)
    record(store, "done", 9.0)
    assert not looked(program, clock, LINGERS_S - LOOK_S) and looked(program, clock, 3 * LOOK_S)


def test_a_store_that_does_not_answer_changes_nothing(tmp_path: Path) -> None:
    store, clock = LocalStorage(tmp_path), Clock()
    program = FinishedProgram(store, "train", clock=clock)
    record(store, "done", 5.0)
    looked(program, clock, 2 * LOOK_S)
    (tmp_path / "steps/train.json").write_bytes(b"{")
    assert looked(program, clock, LINGERS_S + LOOK_S)
