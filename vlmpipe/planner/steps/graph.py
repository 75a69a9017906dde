"""Steps of a run file's compiled pipeline, in order. A test compares them with the compiled graphs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from vlmpipe.catalog.steps import ImageName
from vlmpipe.config.run_config import RunConfig
from vlmpipe.config.sections.sweep import SweepConfig
from vlmpipe.job_spec.build import Job, jobs_of, needs_own_step, step_of

TRAIN_VARIANTS = "train-variants"  # of a sweep: trains and evaluates


@dataclass(frozen=True)
class GraphStep:
    """One step of a stage.

    `job`: the custom job that it starts and watches. `is_expected`: whether a new run runs it; a branch that is not
    taken starts no machine.
    """

    name: str
    image: ImageName = "pipeline"
    job: Job | None = None
    tasks: int = 1  # machines side by side
    is_expected: bool = True


def graph_steps(
    config: RunConfig,
    *,
    encodes: bool,
    replays: bool = True,
    is_last: bool = True,
    sweep: SweepConfig | None = None,
    sweep_jobs: int = 1,
) -> tuple[GraphStep, ...]:
    """The steps of a training.

    Args:
        encodes: whether the features job is expected to run.
        replays: likewise the job that asks the start model, where the data has such a source.
        is_last: False for a stage that another one follows.
        sweep: of a last stage that is a sweep, which has `sweep_jobs` jobs.
    """
    if sweep:
        return (*_sweep(sweep, sweep_jobs), *_ends(config))
    return tuple(_training(config, encodes=encodes, replays=replays, is_last=is_last))


def _training(config: RunConfig, *, encodes: bool, replays: bool, is_last: bool) -> Iterator[GraphStep]:
    yield GraphStep("resolve-run")
    if config.data.replay:
        yield GraphStep("choose-replay")
        yield GraphStep("replay", _image(config, "replay"), "replay", is_expected=replays)
        yield GraphStep("collect-replay", is_expected=replays)
        yield GraphStep("reuse-replay", is_expected=not replays)
    if config.data.tasks > 1:
        yield GraphStep("plan-data")
        yield GraphStep("prepare-chunks", tasks=config.data.tasks)
    yield GraphStep("prepare-data")
    for job in jobs_of(config):
        if job == "replay":
            continue
        yield GraphStep(step_of(job), _image(config, job), job, is_expected=encodes or job != "cache_features")
        if job == "cache_features":
            yield GraphStep("collect-cache-features", is_expected=encodes)
            yield GraphStep("reuse-features", is_expected=not encodes)
        if job == "train":
            yield GraphStep("sync-checkpoint")
        if job == "audit":
            yield GraphStep("collect-audit")
    yield GraphStep("decide")
    if not is_last:
        yield GraphStep("reuse-stage", is_expected=False)
        return
    yield GraphStep("register-model")
    if config.deploy:
        yield GraphStep("deploy-model")
    yield from _ends(config)


def _image(config: RunConfig, job: Job) -> ImageName:
    return "pipeline" if needs_own_step(config, job) else "launcher"


def _sweep(sweep: SweepConfig, jobs: int) -> Iterator[GraphStep]:
    yield GraphStep("resolve-run")
    yield GraphStep("open-sweep")
    yield GraphStep("prepare-data")
    yield GraphStep("cache-features", job="cache_features")
    yield GraphStep("list-jobs")
    yield GraphStep(TRAIN_VARIANTS, job="train", tasks=jobs)
    yield GraphStep("compare-variants")


def _ends(config: RunConfig) -> Iterator[GraphStep]:
    if config.notify.email:
        yield GraphStep("mail", "launcher")
    yield GraphStep("notify")
