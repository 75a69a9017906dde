"""Notes on the end of training: by the service, by the step that watches it, or before its last step."""

from __future__ import annotations

from collections.abc import Iterator

from vlmpipe.config.run_config import RunConfig
from vlmpipe.config.sections.cluster import MAX_WATCHED_S, duration_s
from vlmpipe.job_spec.build import needs_own_step


def time_limit_note(config: RunConfig, train_hours: float | None) -> str:
    """A sentence for training that takes longer than its job may; empty where it does not, or where that is not known.

    A step of ours on Vertex AI also counts the waits of the options before the last: its own time is limited, too.
    """
    if train_hours is None:
        return ""
    limit_s, why = float(duration_s(config.cluster.timeout)), "cluster.timeout"
    if config.gcp.project and needs_own_step(config, "train"):
        waits_s = sum(duration_s(option.wait) for option in config.cluster.capacity_fallback[:-1])
        watched_s = MAX_WATCHED_S - waits_s
        if watched_s < limit_s:
            limit_s = watched_s
            waits = f", less {waits_s / 3600:.1f} h of waits in cluster.capacity_fallback" if waits_s else ""
            why = f"the time of the pipeline's step that watches it, which Vertex AI limits{waits}"
    if train_hours * 3600 <= limit_s:
        return ""
    jobs = "several jobs" if limit_s <= 0 else f"{-(-train_hours * 3600 // limit_s):.0f} jobs"
    return (
        f"Training takes {train_hours:.0f} h, and its job is ended after {max(limit_s, 0) / 3600:.0f} h by {why}: it "
        f"needs {jobs}, each of which continues from the newest checkpoint (submit with --run-id)."
    )


def validation_notes(config: RunConfig, steps: int | None) -> Iterator[str]:
    """Yield what early stopping and the choice of the best step may change in a plan of `steps`; None: not known."""
    train, every = config.train, config.train.validate_every_steps
    if not every or train.trainer:
        return
    if train.early_stopping:
        earliest = every * (train.early_stopping.patience + 1)
        if steps is not None and earliest >= steps:
            yield (
                f"train.early_stopping has no effect: it ends training after {earliest:,} steps at the earliest, and "
                f"there are {steps:,}. Validate more often (train.validate_every_steps)."
            )
        else:
            yield (
                "Training may stop earlier (train.early_stopping), so its hours and its cost are upper bounds: after "
                f"{earliest:,} steps at the earliest."
            )
    if config.checkpoint.export == "best" and steps is not None:
        validated = set(range(every, steps, every))
        more = len(validated - set(range(0, steps, train.checkpoint_every_steps)))
        if not validated:
            yield f"checkpoint.export best has the last step alone to choose from: {steps:,} steps, {every:,} apart."
        elif more:
            yield (
                f"checkpoint.export best saves up to {more:,} more checkpoints, of validated steps that are the best "
                "so far and no multiple of train.checkpoint_every_steps; the time of a step does not count them."
            )
