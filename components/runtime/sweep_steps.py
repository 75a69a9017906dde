"""Logic of a sweep's steps: its trainings and their folders, its jobs, and how a job runs on each target."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

from vlmpipe.components.runtime.curve_check import require_curve
from vlmpipe.components.runtime.prepared_data import features_address, point_to_features, prepare_run
from vlmpipe.config.run_config import RunConfig
from vlmpipe.config.run_settings import earlier_run_file, run_config_of
from vlmpipe.config.sections.stages import naming_stage
from vlmpipe.config.sections.sweep import SweepConfig, Variant, baseline_of
from vlmpipe.job_spec.build import job_order, sweep_order
from vlmpipe.job_spec.order import JobOrder
from vlmpipe.job_spec.worker_pools import STEP_LABEL
from vlmpipe.platforms.table import platform_of
from vlmpipe.trainer.config.job import JobConfig, RunPaths
from vlmpipe.trainer.errors import ConfigError, ExitCode, UserError, print_error
from vlmpipe.trainer.progress import step_progress
from vlmpipe.trainer.records.prepared import DataPointers
from vlmpipe.trainer.records.step import read_step
from vlmpipe.trainer.records.sweep import JOB_STEP, Claim, FeaturesError, Outcome, Sweep, SweepTraining, SweepVariant
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.base import Storage
from vlmpipe.trainer.storage.records import RUN_FILE, read_as_written, write_run_file
from vlmpipe.trainer.trials.files import is_done, settings_sha256

VARIANTS_FOLDER = "variants"  # in the run's folder
ENDED_CHARS = 100  # of the sentence on how a job ended: a step gets those of all jobs, and Vertex AI keeps 200 KB of it
THREADS_VARIABLE = "OMP_NUM_THREADS"
DECIDING = ("model.", "data.", "features.", "train.", "evaluate.")  # fields of `settings_sha256`
STOPPED = (ExitCode.PREEMPTED, ExitCode.INTERRUPTED)


def training_paths(run: RunPaths, variant: str, start: int) -> RunPaths:
    """Where a training reads and writes: it is a run of its own inside the sweep's."""
    return run.model_copy(update={"run_id": f"{run.run_id}/{VARIANTS_FOLDER}/{variant}/{start}"})


def started_at(config: RunConfig, start: int, *, is_curve: bool) -> RunConfig:
    """The run file with the random start of that number: other first weights, order of samples and draws.

    Starts of a learning curve have the same first weights: its chance is that of which samples there are, and a tower
    that is drawn encodes the images once.
    """
    model = config.model if is_curve else config.model.model_copy(update={"seed": config.model.seed + start})
    train = config.train.model_copy(update={"seed": config.train.seed + start})
    return config.model_copy(update={"model": model, "train": train})


def write_sweep(run: RunPaths, sweep: SweepConfig, variants: Sequence[tuple[Variant, RunConfig]]) -> None:
    """Write sweep.json into the run's folder and run.json into that of every training.

    Trainings of the same data name the one that prepares it (`data_from`), those of the same tower besides the one that
    encodes its images (`features_from`).

    Args:
        variants: each with the run file of its training.
    """
    from vlmpipe.trainer.data.prepare.fingerprint import fingerprint

    trainings = list[SweepTraining]()
    first = dict[tuple[str, ...], str]()
    clusters = dict[str, list[int]]()
    for variant, config in variants:
        for start in range(sweep.starts):
            paths = training_paths(run, variant.name, start)
            variant_config = started_at(config, start, is_curve=sweep.is_curve)
            content = variant_config.to_run_json(paths)
            store = open_storage(paths.run_uri)
            _require_same_settings(variant.name, store, variant_config, content)
            write_run_file(store, content)
            with naming_stage(variant.name, kind="variant"):
                job = JobConfig.model_validate(content)
                data, tower = fingerprint(job), features_address(job)
            clusters.setdefault(json.dumps(content["cluster"], sort_keys=True), []).append(len(trainings))
            trainings.append(
                SweepTraining(
                    variant=variant.name,
                    start=start,
                    run_uri=paths.run_uri,
                    data_from=first.setdefault((data,), paths.run_uri),
                    features_from=first.setdefault(
                        (data, tower, variant_config.features.cache, str(variant_config.model.caches_if_auto)),
                        paths.run_uri,
                    ),
                )
            )
    written = Sweep(
        metric=sweep.metric,
        baseline=baseline_of(sweep),
        starts=sweep.starts,
        goal=sweep.goal,
        parallelism=sweep.parallelism,
        hypotheses=tuple(Claim(**claim.model_dump()) for claim in sweep.hypotheses),
        variants=tuple(SweepVariant(name=variant.name, values=variant.values) for variant, _ in variants),
        trainings=tuple(trainings),
        jobs=(),
    )
    if written.shares:  # the first start of a share decides whether the others are trained
        for indices in clusters.values():
            indices.sort(key=lambda index: trainings[index].start)
    jobs = tuple(job for indices in clusters.values() for job in _jobs(indices, sweep.trainings_per_job))
    written.model_copy(update={"jobs": jobs}).write(open_storage(run.run_uri))


def _require_same_settings(variant: str, store: Storage, settings: RunConfig, content: Mapping[str, object]) -> None:
    """Raise ConfigError, which names the fields, where a training of an earlier start is done with other settings: its
    scores would be reported as those of these. A field that came with a later version of vlmpipe, at its default, is
    no other setting."""
    outcome = Outcome.read_if_there(store)
    before = outcome.settings if outcome else ""
    if outcome is None or not before or settings.train.resume == "never" or before == settings_sha256(content):
        return
    from vlmpipe.runs.changed_settings import changed_settings  # loads torch

    earlier = read_as_written(store, RUN_FILE) if store.stat(RUN_FILE) else {}
    named = ""
    if earlier and settings_sha256(earlier) == before:  # else a start with train.resume never has replaced it
        try:
            trained = earlier_run_file(store)
        except ConfigError:
            named = f"{store.uri(RUN_FILE)} is of another version of vlmpipe"
        else:
            texts = changed_settings(trained, settings).texts()
            named = "; ".join(
                text for text in texts if text.startswith(DECIDING) and not text.startswith("train.resume ")
            )
            if not named:  # the new run.json has another digest, by which the next start will look
                outcome.model_copy(update={"settings": settings_sha256(content)}).write(store)
                return
    raise ConfigError(
        ": ".join(filter(None, (f"{store.root_uri} was trained with other settings of variant {variant}", named))),
        expected="the settings that this sweep began with",
        fix="start another run (--run-id), or train all variants from the start (train.resume=never)",
    )


def _jobs(indices: Sequence[int], max_trainings: int) -> list[tuple[int, ...]]:
    """Trainings dealt out to as few jobs as there can be, so that all take about as long."""
    count = -(-len(indices) // max_trainings)
    return [tuple(indices[job::count]) for job in range(count)]


def preparations(run_uri: str) -> list[str]:
    """The folders of trainings that prepare data."""
    return list(dict.fromkeys(training.data_from for training in _sweep(run_uri).trainings))


def _sweep(run_uri: str) -> Sweep:
    return Sweep.read(open_storage(run_uri))


def prepare_variant_data(run_uri: str) -> None:
    """Prepare the data of a training. An error is recorded and printed, but for a request to stop."""
    try:
        with step_progress(run_uri, "prepare-data") as progress:
            prepare_run(JobConfig.load(f"{run_uri}/run.json"), progress)
    except UserError as error:
        if error.code in STOPPED:
            raise
        print_error(error)


def open_jobs(run_uri: str) -> list[str]:
    """Number and folder of each job that has something to do, in one text (see `shares_of`).

    Raises UserError where no data could be prepared.
    """
    sweep = _sweep(run_uri)
    leaders = [open_storage(uri) for uri in preparations(run_uri)]
    if not any(leader.stat(DataPointers.FILE) for leader in leaders):
        record = read_step(leaders[0], "prepare-data")
        raise UserError(
            f"no variant's data could be prepared: {record.message if record else 'the step did not run'}",
            code=ExitCode.DATA,
        )
    if sweep.shares:
        require_curve(sweep)
    done = [is_done(open_storage(training.run_uri)) for training in sweep.trainings]
    return [f"{number} {run_uri}" for number, job in enumerate(sweep.jobs) if not all(done[index] for index in job)]


def encode_features(run_uri: str, target: str) -> str:
    """Encode the images of a training's prepared data that have no features, in a job for each tower. Returns how they
    ended."""
    data = open_storage(run_uri)
    if data.stat(DataPointers.FILE) is None:
        return f"no data in {run_uri}"
    prepared_uri = DataPointers.read(data).prepared_uri
    trainings = _sweep(run_uri.rpartition(f"/{VARIANTS_FOLDER}/")[0]).trainings
    towers = dict.fromkeys(training.features_from for training in trainings if training.data_from == run_uri)
    return "; ".join(_encode(uri, prepared_uri, target) for uri in towers)[:ENDED_CHARS]


def _encode(run_uri: str, prepared_uri: str, target: str) -> str:
    store = open_storage(run_uri)
    pointers = point_to_features(JobConfig.load(store.uri("run.json")), prepared_uri)
    pointers.write(store)
    if store.stat(FeaturesError.FILE):
        store.delete(FeaturesError.FILE)
    if pointers.features != "encode":
        with step_progress(run_uri, "cache-features") as progress:
            progress.finish("reused" if pointers.features == "reuse" else "done", f"features: {pointers.features}")
        return f"cache-features: {pointers.features}"
    config = run_config_of(store)
    ended, error = _run(job_order(config, "cache_features", run_uri), target, run_uri)
    if error:  # without features, each training would find that out on machines of its own
        FeaturesError(error=error).write(store)
    return ended


def train_variants(job: str, target: str) -> str:
    """Run a job of trainings. Returns how it ended."""
    number, _, run_uri = job.partition(" ")
    sweep = _sweep(run_uri)
    config = run_config_of(open_storage(sweep.trainings[sweep.jobs[int(number)][0]].run_uri))
    step = f"{JOB_STEP}-{number}"
    order = sweep_order(config, run_uri, int(number))
    order = replace(order, display_name=f"{config.name}-{step}", labels={**order.labels, STEP_LABEL: step})
    if platform_of(target).is_here and THREADS_VARIABLE not in os.environ:  # jobs beside each other share the cores
        share = max(1, (os.cpu_count() or 1) // min(len(sweep.jobs), sweep.parallelism))
        for pool in order.worker_pool_specs:
            environment = pool["container_spec"].setdefault("env", [])
            if not any(variable["name"] == THREADS_VARIABLE for variable in environment):
                environment.append({"name": THREADS_VARIABLE, "value": str(share)})
    return _run(order, target, run_uri)[0]


def _run(order: JobOrder, target: str, run_uri: str) -> tuple[str, str]:
    """Run the job on the target. Returns how it ended, and its error: a failure is none here, but for a request to
    stop."""
    step = order.labels[STEP_LABEL]
    try:
        platform_of(target).run_job(order)
    except UserError as error:
        if error.code in STOPPED:
            raise
        print(f"{step} in {run_uri}", flush=True)
        print_error(error)
        why = error.found.splitlines()[0]
        return f"{step}: {why}"[:ENDED_CHARS], why
    return f"{step}: done", ""
