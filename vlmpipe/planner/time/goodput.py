"""Time lost to checkpoints, failures and preemptions, and the checkpoint interval that loses least."""

from __future__ import annotations

import math
from dataclasses import dataclass

from vlmpipe.config.run_config import RunConfig
from vlmpipe.job_spec.build import reducer_count
from vlmpipe.planner.time.step_time import Time


@dataclass(frozen=True)
class GoodputLoss:
    """Expected loss of a whole run, at one interval between checkpoints."""

    every_s: float  # of training between checkpoints
    saves_hours: float
    rework_hours: float  # computed again after an interruption
    restarts_hours: float
    interruptions: float  # failures of machines and, on Spot, preemptions

    @property
    def total_hours(self) -> float:
        return self.saves_hours + self.rework_hours + self.restarts_hours


def young_daly_s(save_s: float, mtbf_s: float) -> float:
    """The interval that loses least: sqrt(2 x time of a save x mean time between failures).

    Source: Young 1974, "A first order approximation to the optimum checkpoint interval"; Daly 2006.
    """
    return math.sqrt(2 * save_s * mtbf_s)


def mean_time_between_interruptions_s(config: RunConfig, *, preemptible: bool) -> float:
    """Return the training job's mean time between interruptions; any lost machine, a reducer too, interrupts it.

    Infinite if both rates are 0.
    """
    cluster, plan = config.cluster, config.plan
    rate_per_hour = plan.failures_per_gpu_hour * cluster.replica_count * cluster.accelerator_count
    if preemptible:
        rate_per_hour += plan.preemptions_per_node_hour * (cluster.replica_count + reducer_count(cluster))
    return 3600 / rate_per_hour if rate_per_hour else math.inf


def expected_loss(
    work_s: float, save_s: float, every_s: float, mtbf_s: float, restart_s: float, *, writes_s: float = 0.0
) -> GoodputLoss | None:
    """Loss of a run that computes `work_s` and saves each `every_s`. None: it would never end.

    In its duration T it is interrupted T / mtbf times and each time loses a restart, half an interval, and what it
    computed while the newest checkpoint was still written: T = work + saves + T / mtbf x (every / 2 + writes + restart)
    """
    saves_s = work_s / every_s * save_s
    rework_s = every_s / 2 + min(writes_s, every_s)
    lost_share = (rework_s + restart_s) / mtbf_s
    if lost_share >= 1:
        return None
    interruptions = (work_s + saves_s) / (1 - lost_share) / mtbf_s
    return GoodputLoss(
        every_s, saves_s / 3600, interruptions * rework_s / 3600, interruptions * restart_s / 3600, interruptions
    )


def goodput_loss(
    config: RunConfig, time: Time, *, preemptible: bool, every_s: float | None = None
) -> GoodputLoss | None:
    """Loss of the training job, at the run file's interval or at `every_s`. None: not known, or it would never end."""
    if time.step_s is None or time.steps is None or time.save is None:
        return None
    every_steps = config.train.checkpoint_every_steps
    work_step_s = time.working_s
    mtbf_s = mean_time_between_interruptions_s(config, preemptible=preemptible)
    every_s = every_s or every_steps * work_step_s
    save_s = time.save.blocks_s + max(0.0, time.save.writes_s - every_s)
    restart_s = config.plan.restart_s + time.save.reads_s
    return expected_loss(time.steps * work_step_s, save_s, every_s, mtbf_s, restart_s, writes_s=time.save.writes_s)
