"""Results of a run's jobs: their numbers for the console, the export, and the report at the run's end."""

from __future__ import annotations

import math
from collections.abc import Mapping

from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.errors import DataError
from vlmpipe.trainer.gc_control import collector_off
from vlmpipe.trainer.records.evaluation import Evaluation
from vlmpipe.trainer.records.record import Record
from vlmpipe.trainer.records.replay import ReplayAnswers, ReplayPointer
from vlmpipe.trainer.records.step import require_step
from vlmpipe.trainer.records.summary import Summary
from vlmpipe.trainer.records.sweep import Sweep
from vlmpipe.trainer.storage import open_storage

RESULT_OF: dict[str, type[Record]] = {"train": Summary, "evaluate": Evaluation}  # by job


def job_metrics(run_uri: str, job: str) -> dict[str, float]:
    """The top-level numbers in a job's result file; of benchmarks their scores."""
    store = open_storage(run_uri)
    if job == "cache_features":
        return _numbers({"images": require_step(store, "cache-features").total})
    if job == "replay":
        answers = ReplayAnswers.require(open_storage(ReplayPointer.require(store).folder))
        return _numbers(answers.model_dump(exclude={"record_version"}))
    if job in RESULT_OF:
        return _numbers(RESULT_OF[job].read(store).as_json())
    benchmarks = Evaluation.read(store).benchmarks
    return _numbers(
        {
            f"{name}.{score}": value
            for name, benchmark in benchmarks.items()
            for score, value in benchmark.scores.items()
        }
    )


def evaluation_metrics(run_uri: str) -> dict[str, float]:
    """The numbers of evaluate.json, and the scores of its benchmarks, named `<benchmark>.<score>`."""
    return job_metrics(run_uri, "evaluate") | job_metrics(run_uri, "benchmark")


def evaluated_confusion(run_uri: str) -> tuple[list[str], list[list[int]], str]:
    """Categories, rows and a sentence of the confusion matrix that the console is to show; no categories for none."""
    from vlmpipe.trainer.evaluation.confusion_matrix import shown_confusion

    table, note = shown_confusion(Evaluation.read(open_storage(run_uri)))
    categories, rows = table.square() if table else ([], [])
    return categories, rows, note


def sync_model(job: JobConfig) -> dict[str, object]:
    """Export what training left, of our own trainer or another one. Returns the export's description."""
    if job.train.trainer:
        from vlmpipe.trainer.external.sync import sync_result

        return sync_result(job)
    with collector_off():
        from vlmpipe.trainer.checkpoint.sync import sync_run

    return sync_run(job)


def close_run(run_uri: str, outcome: str) -> str:
    """Write the final report, if the run came far enough to have one, and keep what it measured for the next plan.
    Returns a sentence about the run's end."""
    from vlmpipe.planner.time.calibration import keep_calibration
    from vlmpipe.records.stage_folders import earlier_stages
    from vlmpipe.report.build import write_report

    folders = [run_uri, *earlier_stages(run_uri).values()]
    if not any(open_storage(folder).stat("run.json") for folder in folders):
        return f"run {outcome}: the run file was not accepted, so there is no report"

    keep_calibration(run_uri)
    if open_storage(run_uri).stat(Sweep.FILE):
        return f"run {outcome}; {_close_sweep(run_uri)}"
    return f"run {outcome}; report in {write_report(run_uri)}"


def _close_sweep(run_uri: str) -> str:
    """Compare the finished trainings again: the run may have ended before the step that compares."""
    from vlmpipe.comparison.sweep.page import PAGE
    from vlmpipe.comparison.sweep_report import write_sweep_report

    try:
        write_sweep_report(run_uri)
    except DataError as error:
        return f"no comparison: {error.found}"
    return f"report in {open_storage(run_uri).uri(PAGE)}"


def _numbers(content: Mapping[str, object]) -> dict[str, float]:
    """Return the finite numbers: a metric that is none cannot be written into a pipeline's metadata."""
    return {
        name: value
        for name, value in content.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }
