"""The share of a run's time that went into steps that count."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.planner.configs import run_config
from vlmpipe.planner.time.goodput import expected_loss, mean_time_between_interruptions_s, young_daly_s
from vlmpipe.trainer.monitoring.usage import goodput

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


def test_young_daly() -> None:
    assert young_daly_s(50, 36_000) == pytest.approx(math.sqrt(2 * 50 * 36_000))


def test_more_gpus_fail_more_often_and_spot_nodes_are_preempted_besides() -> None:
    def mtbf_hours(nodes: int, *, preemptible: bool, **plan: float) -> float:
        config = run_config(cluster__replica_count=nodes, **{f"plan__{name}": rate for name, rate in plan.items()})
        return mean_time_between_interruptions_s(config, preemptible=preemptible) / 3600

    assert mtbf_hours(1, preemptible=False) == pytest.approx(50_000 / 8)
    assert mtbf_hours(4, preemptible=False) == pytest.approx(50_000 / 32)
    assert mtbf_hours(4, preemptible=True) == pytest.approx(1 / (32 / 50_000 + 4 * 0.02))
    assert mtbf_hours(1, preemptible=True, failures_per_gpu_hour=0, preemptions_per_node_hour=0) == math.inf


def test_each_reducer_on_spot_is_preempted_as_a_node_is() -> None:
    reducers = {"replica_count": 13, "machine_type": "n1-highcpu-16"}
    config = run_config(cluster__replica_count=4, cluster__reduction_server=reducers, plan__failures_per_gpu_hour=0)
    assert mean_time_between_interruptions_s(config, preemptible=True) == pytest.approx(3600 / (17 * 0.02))
    assert mean_time_between_interruptions_s(config, preemptible=False) == math.inf


def test_expected_loss_by_hand() -> None:
    """100 h of work, 36 s a save, each hour; stopped every 10 h; half an hour and 6 minutes lost each time."""
    lost = expected_loss(360_000, 36, 3600, 36_000, 360)
    assert lost is not None
    assert lost.saves_hours == pytest.approx(1)
    assert lost.interruptions == pytest.approx(101 / (1 - 0.06) / 10)
    assert lost.rework_hours == pytest.approx(0.5 * lost.interruptions)
    assert lost.restarts_hours == pytest.approx(0.1 * lost.interruptions)


def test_without_interruptions_only_saves_are_lost() -> None:
    lost = expected_loss(360_000, 36, 3600, math.inf, 360)
    assert lost is not None and lost.total_hours == lost.saves_hours == pytest.approx(1)


def test_work_since_a_checkpoint_that_is_still_written_is_lost_too() -> None:
    written, writing = (expected_loss(360_000, 36, 3600, 36_000, 360, writes_s=s) for s in (0, 600))
    assert written is not None and writing is not None
    per_interruption = [lost.rework_hours / lost.interruptions for lost in (written, writing)]
    assert per_interruption[1] - per_interruption[0] == pytest.approx(600 / 3600)


def test_a_run_that_loses_more_than_it_computes_never_ends() -> None:
    assert expected_loss(360_000, 36, 7200, 3600, 600) is None


@given(st.floats(1, 300), st.floats(4, 500), st.floats(0, 600), st.floats(1.5, 20))
def test_the_young_daly_interval_loses_least(save_s: float, mtbf_hours: float, restart_s: float, factor: float) -> None:
    mtbf_s = mtbf_hours * 3600
    best_s = young_daly_s(save_s, mtbf_s)
    best = expected_loss(1e6, save_s, best_s, mtbf_s, restart_s)
    assert best is not None
    for every_s in (best_s / factor, best_s * factor):
        other = expected_loss(1e6, save_s, every_s, mtbf_s, restart_s)
        assert other is None or best.total_hours <= other.total_hours
