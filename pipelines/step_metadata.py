"""Size of what a pipeline's steps hand on, which Vertex AI keeps in the metadata of their executions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from vlmpipe.components.runtime.parameters import compiled_settings
from vlmpipe.config.sections.sweep import variants_of
from vlmpipe.job_spec.build import jobs_of, worker_pools
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.storage.base import join_uri

if TYPE_CHECKING:
    from vlmpipe.config.run_config import RunConfig
    from vlmpipe.platforms.base import Platform

RUN_ID_CHARS = 87  # of a run without --run-id: its name, date, time and random digits


def check_step_metadata(config: RunConfig, platform: Platform) -> None:
    """Raise ConfigError where a step of the run hands on, or takes, more than the platform's records may hold."""
    limit = platform.max_step_bytes
    assert limit
    for step, size, fix in _sizes(config, platform):
        if size > limit:
            raise ConfigError(
                f"the inputs and outputs of step {step} take about {size / 1000:,.0f} KB",
                expected=f"at most {limit // 1000} KB, which {platform.title} keeps of a step",
                fix=fix,
            )


def _sizes(config: RunConfig, platform: Platform) -> Iterator[tuple[str, int, str]]:
    """Step, bytes and what to do, of the steps whose inputs or outputs grow with the run file."""
    root_uri = platform.root_uri(config)
    run_uri = join_uri(root_uri, "runs", "x" * RUN_ID_CHARS)
    run_file = json.dumps(config.to_dict(), ensure_ascii=False)
    for stage, run in config.stage_runs().items():
        pools = [worker_pools(run, job, run_uri) for job in jobs_of(run)]
        taken = [run_file, compiled_settings(config, platform.name, root_uri, stage), *pools]
        step = f"{stage}-resolve-run" if stage else "resolve-run"
        yield step, sum(map(_size, taken)), "write a shorter run file, with fewer variants or shorter texts"
    if config.sweep:
        from vlmpipe.components.runtime.sweep_steps import ENDED_CHARS, VARIANTS_FOLDER  # heavy: it trains

        fix = "raise sweep.trainings_per_job, so that there are fewer jobs, or split the sweep"
        names = [variant.name for variant in variants_of(config.sweep)]
        starts = range(config.sweep.starts)
        trainings = [f"{run_uri}/{VARIANTS_FOLDER}/{name}/{start}" for name in names for start in starts]
        jobs = -(-len(trainings) // config.sweep.trainings_per_job)
        # At most: each training has data of its own, and each job failed.
        yield "list-jobs", jobs * _size(f"{jobs} {run_uri}") + len(trainings) * (ENDED_CHARS + 4), fix
        yield "open-sweep", _size(trainings), fix
        yield "compare-variants", jobs * (ENDED_CHARS + 4), fix


def _size(value: object) -> int:
    return len(json.dumps(value, ensure_ascii=False).encode())
