"""The share of a run's time that went into steps that count."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.monitoring.training_monitor import goodput

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
