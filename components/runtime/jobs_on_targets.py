"""Runs a job of a run on a platform, from a step."""

from __future__ import annotations

from typing import get_args

from vlmpipe.components.runtime.prepared_data import why_nothing_is_encoded
from vlmpipe.components.runtime.replay_steps import choose_for_run, why_nothing_is_answered
from vlmpipe.config.run_settings import run_config_of
from vlmpipe.job_spec.build import Job, job_order, jobs_of
from vlmpipe.platforms.table import PLATFORMS, platform_of
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.progress import step_progress
from vlmpipe.trainer.records.prepared import DataPointers
from vlmpipe.trainer.storage import open_storage

NOTHING_RAN = "{}"  # gcp_resources of a job that has nothing to do


def run_job_of_run(run_uri: str, job: str, target: str) -> str:
    """Run a job of the run in this folder on a target. Returns its `gcp_resources`.

    cache_features does nothing, and says why, where all images have features or none are wanted; replay, where the
    start model's answers are there.

    Raises ConfigError for a job that the run does not have, and for a target that the run file has no settings for.
    """
    if job not in get_args(Job) or target not in PLATFORMS:
        raise ConfigError(
            f"job {job!r} on target {target!r}",
            expected=f"a job of {', '.join(get_args(Job))}, on {', '.join(PLATFORMS)}",
        )
    store = open_storage(run_uri)
    config = run_config_of(store)
    if job not in jobs_of(config):
        raise ConfigError(f"job {job}, which this run does not have", expected=f"one of {', '.join(jobs_of(config))}")
    platform_of(target).check(config)
    if job == "replay":
        with step_progress(run_uri, "choose-replay") as progress:
            state, _ = choose_for_run(run_uri, progress)
        if state == "reuse":
            with step_progress(run_uri, "replay") as progress:
                progress.finish("reused", why_nothing_is_answered(run_uri))
            return NOTHING_RAN
    if job == "cache_features":
        features = DataPointers.read(store).features
        if features != "encode":
            with step_progress(run_uri, "cache-features") as progress:
                progress.finish("reused" if features == "reuse" else "done", why_nothing_is_encoded(run_uri, features))
            return NOTHING_RAN
    return platform_of(target).run_job(job_order(config, job, run_uri))
