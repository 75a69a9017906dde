"""The share of a run's time that went into steps that count."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlmpipe.planner.time.goodput import expected_loss
from vlmpipe.trainer.monitoring.training_monitor import goodput

BEGAN_S = 1e9


def lines(steps: list[int], step_s: float, *, began_s: float = BEGAN_S, after: int = 0, **lost: float) -> list[Any]:
    """The lines of an attempt that goes on after step `after`: it logs at `steps`, each of which takes `step_s`."""
    return [
        {"step": step, "step_s": step_s, "time_s": began_s + (step - after) * step_s}
        | {"data_wait_s": 0.0, "checkpoint_stall_s": 0.0, **lost}
        for step in steps
    ]


@given(every=st.integers(1, 20), count=st.integers(1, 30), step_s=st.floats(0.01, 100))
def test_the_goodput_of_an_undisturbed_run_is_1(every: int, count: int, step_s: float) -> None:
    steps = [1, *range(every, every * count + 1, every)] if every > 1 else list(range(1, count + 1))
    logged = lines(steps, step_s)
    assert goodput(logged, until_s=logged[-1]["time_s"]) == pytest.approx(1, rel=1e-5)


def test_waits_restarts_and_repeated_steps_lower_goodput() -> None:
    waited = lines([10, 20], 1.0, data_wait_s=1.0, checkpoint_stall_s=2.0)
    assert goodput(waited, until_s=BEGAN_S + 20) == pytest.approx(14 / 20)
    # Killed at step 19 with a checkpoint of step 10; two minutes later the next attempt begins. Lines after step 10
    # were dropped when it did: what they had measured did not happen.
    again = [*lines([10], 1.0), *lines([20], 1.0, began_s=BEGAN_S + 19 + 120, after=10)]
    assert goodput(again, until_s=again[-1]["time_s"]) == pytest.approx(20 / (19 + 120 + 10))


def test_lines_of_earlier_versions_give_no_goodput() -> None:
    old = {"step": 10, "step_s": 1.0, "data_wait_s": 0.0, "checkpoint_stall_s": 0.0}
    assert goodput([], until_s=BEGAN_S) is None and goodput([old], until_s=BEGAN_S) is None
    new = lines([20], 1.0, after=10)
    assert goodput([old, *new], until_s=new[-1]["time_s"]) == pytest.approx(1)


def simulated_s(
    work_s: float, save_s: float, every_s: float, mtbf_s: float, restart_s: float, writes_s: float, seed: int
) -> float:
    """Duration of one run, event by event: interruptions at exponential intervals, from the newest written checkpoint.

    A checkpoint counts `writes_s` after its save. An interruption during a restart begins it anew.
    """
    draw = random.Random(seed)
    clock = done_s = kept_s = 0.0
    next_stop = draw.expovariate(1 / mtbf_s)
    while True:
        # One stretch without interruption, from the kept checkpoint on.
        since_s = clock
        while clock < next_stop and done_s < work_s:
            piece_s = min(every_s, work_s - done_s)
            if clock + piece_s + save_s > next_stop:
                break
            clock, done_s = clock + piece_s + save_s, done_s + piece_s
            if clock + writes_s <= next_stop:
                kept_s = done_s
        if done_s >= work_s:
            return clock
        assert next_stop >= since_s
        clock, done_s = next_stop + restart_s, kept_s
        next_stop = next_stop + draw.expovariate(1 / mtbf_s)
        while next_stop < clock:
            clock = next_stop + restart_s
            next_stop += draw.expovariate(1 / mtbf_s)


@pytest.mark.parametrize(
    ("save_s", "every_s", "mtbf_hours", "restart_s", "writes_s"),
    [(1, 600, 50, 600, 60), (30, 1800, 12, 600, 0), (1, 300, 3, 300, 120), (5, 900, 100, 60, 30)],
)
def test_the_closed_form_is_the_mean_of_simulated_runs(
    save_s: float, every_s: float, mtbf_hours: float, restart_s: float, writes_s: float
) -> None:
    work_s, mtbf_s = 100 * 3600.0, mtbf_hours * 3600
    lost = expected_loss(work_s, save_s, every_s, mtbf_s, restart_s, writes_s=writes_s)
    assert lost is not None
    runs = [simulated_s(work_s, save_s, every_s, mtbf_s, restart_s, writes_s, seed) for seed in range(300)]
    assert work_s + 3600 * lost.total_hours == pytest.approx(sum(runs) / len(runs), rel=0.02)
