"""Check whether training ends before the service ends its job, or the step that watches it."""

from __future__ import annotations

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
