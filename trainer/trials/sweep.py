"""A job of a sweep: its trainings one after the other, each with its evaluation.

    python -m vlmpipe.trainer.trials.sweep --config <run>/sweep.json --job 3 --nproc-per-node 1

Each training is a run of its own, with prepared data that it shares with others. What became of it is in its
`outcome.json`; one that failed leaves the others. Started again, a job continues with what is not done.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Callable, Sequence
from typing import Literal

from vlmpipe.trainer.gc_control import collector_off

with collector_off():
    from vlmpipe.trainer import launch
    from vlmpipe.trainer.config.job import JobConfig, secrets_of
    from vlmpipe.trainer.distributed.cluster_env import read_cluster
    from vlmpipe.trainer.distributed.process import run_worker
    from vlmpipe.trainer.errors import ConfigError, ExitCode, UserError
    from vlmpipe.trainer.preflight.machine import require_machine
    from vlmpipe.trainer.progress import Progress
    from vlmpipe.trainer.records.evaluation import Evaluation
    from vlmpipe.trainer.records.prepared import DataPointers
    from vlmpipe.trainer.records.step import read_step
    from vlmpipe.trainer.records.sweep import JOB_STEP, FeaturesError, Outcome, Sweep, SweepTraining
    from vlmpipe.trainer.secret_manager import use_secrets
    from vlmpipe.trainer.storage import open_storage
    from vlmpipe.trainer.storage.records import RUN_FILE, read_record
    from vlmpipe.trainer.trials.files import is_done, settings_sha256
    from vlmpipe.trainer.trials.forked import Ended, ForkedChildren

CLUSTER_VARIABLES = ("CLUSTER_SPEC", "TF_CONFIG")

# Trains, exports and evaluates; adds the seconds of each part.
Run = Callable[[JobConfig, dict[str, float]], Ended]


def main(arguments: list[str] | None = None) -> int:
    """Run the job on this node. Returns its exit code: 0 also where trainings failed, which their outcomes say."""
    parser = argparse.ArgumentParser(prog="vlmpipe.trainer.trials.sweep", description=__doc__)
    parser.add_argument("--config", required=True, help="URI of the sweep's sweep.json")
    parser.add_argument("--job", required=True, type=int, help="number of the job, from 0")
    parser.add_argument("--nproc-per-node", default="auto", help="see vlmpipe.trainer.launch")
    options = parser.parse_args(arguments)
    folder = options.config.rpartition("/")[0]
    require_machine(os.environ, run_uri=folder, step=f"{JOB_STEP}-{options.job}")
    store = open_storage(folder)
    sweep = Sweep.read(store)
    if not 0 <= options.job < len(sweep.jobs):
        raise ConfigError(f"--job is {options.job}", expected=f"0 to {len(sweep.jobs) - 1}")
    trainings = [sweep.trainings[index] for index in sweep.jobs[options.job]]
    cluster = read_cluster(os.environ)
    is_chief = cluster is None or cluster.node_rank == 0
    is_alone = launch.processes_on_node(options.nproc_per_node) == 1 and (cluster is None or cluster.num_nodes == 1)
    use_secrets(secrets_of(store))
    progress = Progress(folder, f"{JOB_STEP}-{options.job}", quiet=True) if is_chief else None
    run = (
        _forked([training.run_uri for training in trainings])
        if is_alone
        else _launched(options.nproc_per_node, is_chief=is_chief)
    )
    skips = is_chief and (cluster is None or cluster.num_nodes == 1)  # nodes that decide apart would wait for another
    failed = 0
    for done, training in enumerate(trainings):
        if progress:
            # Not in the background: a child must not be forked while a thread holds a lock.
            progress.record.done, progress.record.total = done, len(trainings)
            progress.record.unit, progress.record.message = "trainings", training.title
            progress.flush()
        if skips and (why := _hopeless(sweep, training)):
            _skip(training, why)
            continue
        state = _train(training, run, is_chief=is_chief)
        if state == "stopped":
            return int(ExitCode.PREEMPTED)
        failed += state == "failed"
    if progress:
        progress.record.done = len(trainings)
        progress.finish(message=f"{len(trainings)} trainings, {failed} failed" if failed else f"{len(trainings)} done")
    return 0


def _train(training: SweepTraining, run: Run, *, is_chief: bool) -> str:
    """Train, export and evaluate; record what became of it. Returns done, failed or stopped."""
    store, started_s = open_storage(training.run_uri), time.time()
    title = training.title
    if is_done(store):
        print(f"sweep: {title}: done before", flush=True)
        return "done"
    print(f"sweep: {title}", flush=True)
    took = dict[str, float]()
    try:
        _prepared(training).write(store)
        ended = run(JobConfig.load(store.uri("run.json")), took)
    except UserError as error:
        ended = Ended(int(error.code), error.found)
    if ended.code == ExitCode.PREEMPTED:
        return "stopped"
    state: Literal["done", "failed"] = "failed" if ended.code else "done"
    print(f"sweep: {title}: {state} in {time.time() - started_s:.1f} s {ended.error}".rstrip(), flush=True)
    if is_chief:
        Outcome(
            state=state,
            exit_code=ended.code,
            error=ended.error,
            settings=settings_sha256(read_record(store, RUN_FILE)),
            submission=JobConfig.read(store).run.submission,
            started_s=started_s,
            ended_s=time.time(),
            **took,
        ).write(store)
    return state


def _hopeless(sweep: Sweep, training: SweepTraining) -> str:
    """Why a further start of a learning curve's share is not trained; empty where it is. The largest share is always
    trained, and all of them where the metric has no baseline."""
    shares = sweep.shares
    if not shares or not training.start or sweep.metric != "exact_match":
        return ""
    if shares[training.variant] == max(shares.values()) or is_done(open_storage(training.run_uri)):
        return ""
    first = next(start for start in sweep.trainings if start.variant == training.variant and not start.start)
    store = open_storage(first.run_uri)
    if not is_done(store) or (evaluation := Evaluation.read_if_there(store)) is None:
        return ""
    score, baseline = evaluation.exact_match, evaluation.chance
    if score is None or baseline is None or score > baseline:
        return ""
    return f"its first start answers {score:.1%}, no more than the majority baseline's {baseline:.1%}"


def _skip(training: SweepTraining, why: str) -> None:
    store = open_storage(training.run_uri)
    print(f"sweep: {training.title}: not trained: {why}", flush=True)
    Outcome(
        state="skipped",
        error=why,
        settings=settings_sha256(read_record(store, RUN_FILE)),
        submission=JobConfig.read(store).run.submission,
        started_s=time.time(),
        ended_s=time.time(),
    ).write(store)


def _prepared(training: SweepTraining) -> DataPointers:
    """The prepared.json that the training shares. Raises UserError with what kept its data from being prepared, or
    its images from being encoded."""
    store = open_storage(training.features_from)
    if store.stat(DataPointers.FILE) is None:
        record = read_step(open_storage(training.data_from), "prepare-data")
        why = record.detail.get("error", "") if record else ""
        raise UserError(f"its data could not be prepared: {why or 'the step did not run'}", code=ExitCode.DATA)
    if unencoded := FeaturesError.read_if_there(store):
        raise UserError(f"the images of its data could not be encoded: {unencoded.error}", code=ExitCode.DATA)
    return DataPointers.read(store)


def _forked(run_uris: Sequence[str]) -> Run:
    """Run each training in a child of this process, which imports everything once."""
    with collector_off():
        import vlmpipe.trainer.checkpoint.sync  # noqa: F401, what `_export` imports
        import vlmpipe.trainer.evaluation.evaluate as evaluation
        import vlmpipe.trainer.train as training
        from vlmpipe.trainer.models.registry import family_of

    for run_uri in run_uris:
        with contextlib.suppress(UserError):  # the training says it
            family_of(JobConfig.load(f"{run_uri}/run.json").model)
    with contextlib.suppress(ImportError):  # a table of patterns, which take the library half a second to compile
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping

        get_checkpoint_conversion_mapping("qwen2")
    children = ForkedChildren()

    def run(job: JobConfig, took: dict[str, float]) -> Ended:
        config = ["--config", f"{job.run.run_uri}/run.json"]
        parts = {"train_s": lambda: training.main(config)} if job.train.epochs else {}
        ended = Ended(0)
        for name, work in {
            **parts, "export_s": lambda: _export(job), "evaluate_s": lambda: evaluation.main(config),
        }.items():  # fmt: skip
            started_s = time.perf_counter()
            ended = children.run(work)
            took[name] = time.perf_counter() - started_s
            if ended.code or children.stopped:
                break
        return Ended(int(ExitCode.PREEMPTED)) if children.stopped else ended

    return run


def _launched(processes: str, *, is_chief: bool) -> Run:
    """By `vlmpipe.trainer.launch`, for a training with several processes."""

    def run(job: JobConfig, took: dict[str, float]) -> Ended:
        def launched(module: str, what: str) -> Ended:
            started_s, config = time.perf_counter(), f"{job.run.run_uri}/run.json"
            code = launch.main(["--nproc-per-node", processes, "--", module, "--config", config])
            took[f"{what}_s"] = time.perf_counter() - started_s
            return Ended(code, f"{what} ended with exit code {code}" if code else "")

        ended = launched("vlmpipe.trainer.train", "train") if job.train.epochs else Ended(0)
        if ended.code or not is_chief:
            return ended
        started_s = time.perf_counter()
        _export(job)
        took["export_s"] = time.perf_counter() - started_s
        before = {name: os.environ.pop(name) for name in CLUSTER_VARIABLES if name in os.environ}
        try:
            return launched("vlmpipe.trainer.evaluation.evaluate", "evaluate")
        finally:
            os.environ.update(before)

    return run


def _export(job: JobConfig) -> None:
    if job.train.epochs:
        from vlmpipe.trainer.checkpoint.sync import sync_run

        sync_run(job)
    else:
        from vlmpipe.trainer.checkpoint.export.hf_export import export_initial

        export_initial(job)


if __name__ == "__main__":
    run_worker(main)  # an interpreter that has imported torch and transformers takes a second to end by itself
