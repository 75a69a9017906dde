"""Time lost to checkpoints and preemptions, and the checkpoint interval that loses least."""

from __future__ import annotations

import math
from dataclasses import dataclass

from vlmpipe.config.run_config import RunConfig
from vlmpipe.planner.time.step_time import Time


@dataclass(frozen=True)
class GoodputLoss:
    """Expected loss of a whole run, at one interval between checkpoints."""

    every_s: float  # of training between checkpoints
    saves_hours: float
    rework_hours: float  # computed again after a preemption: half an interval each time
    restarts_hours: float
    preemptions: float

    @property
    def total_hours(self) -> float:
        return self.saves_hours + self.rework_hours + self.restarts_hours


def young_daly_s(save_s: float, mtbf_s: float) -> float:
    """The interval that loses least: sqrt(2 x time of a save x mean time between failures).

    Source: Young 1974, "A first order approximation to the optimum checkpoint interval"; Daly 2006.
    """
    return math.sqrt(2 * save_s * mtbf_s)


def mean_time_between_preemptions_s(config: RunConfig) -> float:
    """Of the training job: a preempted node stops all. Infinite at a rate of 0."""
    rate_per_hour = config.plan.preemptions_per_node_hour * config.cluster.replica_count
    return 3600 / rate_per_hour if rate_per_hour else math.inf


def expected_loss(work_s: float, save_s: float, every_s: float, mtbf_s: float, restart_s: float) -> GoodputLoss | None:
    """Loss of a run that computes `work_s` and saves each `every_s`. None: it would never end.

    In its duration T it is preempted T / mtbf times and loses half an interval and a restart each time:
    T = work + saves + T / mtbf x (every / 2 + restart).
    """
    saves_s = work_s / every_s * save_s
    lost_share = (every_s / 2 + restart_s) / mtbf_s
    if lost_share >= 1:
        return None
    preemptions = (work_s + saves_s) / (1 - lost_share) / mtbf_s
    return GoodputLoss(
        every_s, saves_s / 3600, preemptions * every_s / 2 / 3600, preemptions * restart_s / 3600, preemptions
    )


def goodput_loss(
    config: RunConfig, time: Time, *, preemptible: bool, every_s: float | None = None
) -> GoodputLoss | None:
    """Loss of the training job, at the run file's interval or at `every_s`. None: not known, or it would never end."""
    if time.step_s is None or time.steps is None or time.save_s is None:
        return None
    every_steps = config.train.checkpoint_every_steps
    work_step_s = time.step_s - time.save_s / every_steps
    mtbf_s = mean_time_between_preemptions_s(config) if preemptible else math.inf
    every_s = every_s or every_steps * work_step_s
    return expected_loss(time.steps * work_step_s, time.save_s, every_s, mtbf_s, config.plan.restart_s)
