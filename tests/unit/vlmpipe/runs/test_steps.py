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


@given(start_s=st.floats(0.0, 1e4), unit_s=st.floats(0.01, 10.0), units=st.lists(st.integers(1, 300), min_size=2))
def test_an_eta_does_not_count_what_a_step_took_to_begin(start_s: float, unit_s: float, units: list[int]) -> None:
    """The first unit is seen after `start_s`, as on a busy machine; then every unit takes the same time."""
    clocks, total = SteadyClocks(), 1000
    for done in (1, *sorted(units)):
        elapsed_s = start_s + (done - 1) * unit_s
        (step,) = clocks([Step("evaluate", "running", elapsed_s, done, total, started_s=1e6)])
        if step.eta_s is not None:
            assert step.eta_s == pytest.approx((total - done) * unit_s, rel=1e-3)


def test_an_eta_of_a_job_that_counts_anew_is_of_that_job() -> None:
    clocks = SteadyClocks()
    for elapsed_s, done in ((100.0, 50), (200.0, 1), (240.0, 41)):
        (step,) = clocks([Step("evaluate", "running", elapsed_s, done, 101, started_s=1e6)])
    assert step.eta_s == pytest.approx(60.0)


def test_an_eta_goes_down_between_units_and_ends_where_one_takes_longer_than_all_were_expected_to() -> None:
    clocks, etas = SteadyClocks(), list[float | None]()
    for elapsed_s, done in ((20.0, 1), (60.0, 2), (70.0, 2), (130.0, 2), (150.0, 2), (160.0, 3)):
        (step,) = clocks([Step("train-variants", "running", elapsed_s, done, 4, started_s=1e6)])
        etas.append(step.eta_s)
    assert etas == [None, 80.0, 70.0, 10.0, None, 70.0]


def test_an_eta_counts_the_work_of_units_that_differ() -> None:
    """Two of four trainings, of 30 % of all samples, took 60 s: what is left takes 140 s."""
    clocks = SteadyClocks()
    for elapsed_s, done, work in ((1.0, 0, 0.005), (61.0, 2, 0.305)):
        (step,) = clocks([Step("train-variants", "running", elapsed_s, done, 4, work=work, started_s=1e6)])
    assert step.eta_s == pytest.approx(139.0) and step.share == 0.305 and (step.done, step.total) == (2, 4)
