"""What a person sees of a step: its clock, and when it may be over."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlmpipe.runs.steps import SteadyClocks, Step


@pytest.mark.parametrize(
    ("done", "total", "elapsed_s", "eta_s"),
    [
        (1, 1600, 8.5, None),  # the first sample also took the step's start
        (1, 300, 10.0, None),
        (6, 300, 10.0, 490.0),
        (30, 10_000, 90.0, 29_910.0),  # of a long step a small share says enough
        (0, 300, 100.0, None),
    ],
)
def test_an_eta_is_shown_once_it_is_worth_something(
    done: float, total: float, elapsed_s: float, eta_s: float | None
) -> None:
    assert Step("train", "running", elapsed_s, done=done, total=total).eta_s == eta_s


@given(st.lists(st.floats(1.0, 1e3), min_size=1, max_size=9))
def test_a_clock_never_goes_back(starts: list[float]) -> None:
    """Each look is one second later; records of one step tell of other starts."""
    clocks, now_s, before_s = SteadyClocks(), 2e3, 0.0
    for started_s in starts:
        now_s += 1.0
        (step,) = clocks([Step("train", "running", now_s - started_s, started_s=started_s)])
        assert step.elapsed_s > before_s
        before_s = step.elapsed_s


def test_a_step_that_waits_has_no_clock() -> None:
    assert SteadyClocks()([Step("train")]) == (Step("train"),)
