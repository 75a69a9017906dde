"""Hours of a training program that no plan knows: those that the run file says, or those of an earlier run's steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.pipelines.run_files import small
from vlmpipe.planner.time.external_trainer import external_time
from vlmpipe.planner.time.step_time import Time


def planned(**changes: Any) -> Time:
    program = {"name": "mine", "command": ["python", "train.py"], "total_steps": 1800}
    time = external_time(small(train__trainer=program, **changes))
    assert (time.step_s, time.mfu, time.tokens_per_s_per_gpu) == (None, None, None)
    assert "mine is a trainer that this plan does not know" in time.assumptions[0]
    return time


def run_with_steps(folder: Path, *seconds: float) -> str:
    lines = [json.dumps({"step": step, "loss": 1.0, "step_s": one}) for step, one in enumerate(seconds, 1)]
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return str(folder)


def test_the_run_files_hours_count_most(tmp_path: Path) -> None:
    time = planned(plan__train_hours=3.5, plan__calibrate_from=run_with_steps(tmp_path, *[2.0] * 5))
    assert (time.train_hours, time.steps) == (3.5, 1800)
    assert "Training takes 3.5 h, as the run file says" in time.assumptions[0]


def test_an_earlier_runs_steps_give_the_hours_without_the_first(tmp_path: Path) -> None:
    time = planned(plan__calibrate_from=run_with_steps(tmp_path, 60.0, 2.0, 2.0, 9.0))
    assert time.train_hours == pytest.approx(1.0)
    assert f"1,800 steps of 2 s each, the median in {tmp_path}" in time.assumptions[0]


@pytest.mark.parametrize("seconds", [(), (60.0, 2.0, 2.0)], ids=["no run", "too few steps"])
def test_without_enough_steps_the_hours_are_open_and_said_so(tmp_path: Path, seconds: tuple[float, ...]) -> None:
    source = run_with_steps(tmp_path, *seconds) if seconds else str(tmp_path)
    time = planned(plan__calibrate_from=source)
    assert time.train_hours is None
    assert "How long it takes is not known: give plan.train_hours" in time.assumptions[0]


def test_without_a_total_the_hours_are_open(tmp_path: Path) -> None:
    program = {"name": "mine", "command": ["python", "train.py"]}
    source = run_with_steps(tmp_path, *[2.0] * 5)
    time = external_time(small(train__trainer=program, plan__calibrate_from=source))
    assert (time.train_hours, time.steps) == (None, None)
