"""Time of a training program of the user's own: what the run file says, or what an earlier run measured."""

from __future__ import annotations

import statistics

from vlmpipe.config.run_config import RunConfig
from vlmpipe.planner.time.step_time import Time
from vlmpipe.trainer.records.metrics import step_seconds
from vlmpipe.trainer.storage import open_storage

FEWEST = 3  # logged steps after the first, which starts up


def external_time(config: RunConfig) -> Time:
    """Hours of the training job, as far as they are known; no parts of a step, and no MFU."""
    trainer, plan = config.train.trainer, config.plan
    assert trainer
    steps = trainer.total_steps or config.train.max_steps or None
    step_s = _measured_step_s(plan.calibrate_from) if plan.calibrate_from else None
    hours = plan.train_hours
    if hours is not None:
        sentence = f"Training takes {hours:g} h, as the run file says (plan.train_hours)."
    elif step_s and steps:
        hours = step_s * steps / 3600
        sentence = f"{steps:,} steps of {step_s:.3g} s each, the median in {plan.calibrate_from}."
    else:
        sentence = (
            "How long it takes is not known: give plan.train_hours, or plan.calibrate_from of a run that made a few "
        )
        sentence += "minutes of steps, and train.trainer.total_steps."
    assumptions = (
        f"{trainer.name} is a trainer that this plan does not know: its memory and MFU are not planned. {sentence}",
        "Time lost to interruptions is not counted: what its checkpoints cost is not known.",
    )
    return Time(None, (), None, "", steps, hours, None, None, 0.0, assumptions)


def _measured_step_s(run_uri: str) -> float | None:
    """Median step of a run's metrics.jsonl, also of one that still runs; None for too few, or no folder."""
    steps = step_seconds(open_storage(run_uri))
    return statistics.median(steps) if len(steps) >= FEWEST else None
