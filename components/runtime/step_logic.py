"""Logic of steps that belongs neither to the trainer nor to the gate or the report, and does not need KFP."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Literal

from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.errors import DataError, print_warning
from vlmpipe.trainer.gc_control import collector_off
from vlmpipe.trainer.records.evaluation import Evaluation
from vlmpipe.trainer.records.prepared import CHANGES_FILE, DataPointers
from vlmpipe.trainer.records.record import Record
from vlmpipe.trainer.records.replay import ReplayAnswers, ReplayPointer
from vlmpipe.trainer.records.step import require_step
from vlmpipe.trainer.records.summary import Summary
from vlmpipe.trainer.records.sweep import Sweep
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.records import read_record, write_record

if TYPE_CHECKING:
    from vlmpipe.trainer.data.prepare.pipeline import Prepared
    from vlmpipe.trainer.progress import Progress

RESULT_OF: dict[str, type[Record]] = {"train": Summary, "evaluate": Evaluation}  # by job


def prepare_run(job: JobConfig, progress: Progress) -> tuple[DataPointers, dict[str, int]]:
    """Prepare the run's data; write `prepared.json`, `data_changes.json`. Returns the first, and counts of samples."""
    from vlmpipe.trainer.data.accounting.coverage import images_sentence
    from vlmpipe.trainer.data.prepare.chunks.merge import IMAGES, WITHOUT_IMAGES
    from vlmpipe.trainer.data.prepare.pipeline import prepare

    prepared = prepare(job, progress)
    pointers = point_to_features(job, prepared.uri)
    if job.train.trainer:
        from vlmpipe.trainer.external.base_model import write_base_model

        write_base_model(job, prepared.uri)
    pointers.write(open_storage(job.run.run_uri))
    _note_changes(job.run.run_uri, prepared)
    shown = {name: count for name, count in prepared.counts.items() if count and name not in (IMAGES, WITHOUT_IMAGES)}
    parts = ["samples: " + ", ".join(f"{count} {name}" for name, count in shown.items())]
    parts.append(images_sentence(prepared.counts[IMAGES], prepared.counts[WITHOUT_IMAGES]) + prepared.notes)
    if prepared.changes:
        parts.append(prepared.changes.sentence())
    if prepared.chunks and prepared.chunks.total > 1:
        parts.append(f"{prepared.chunks.prepared} of {prepared.chunks.total} chunks prepared here")
    progress.finish("reused" if prepared.reused else "done", "; ".join([*parts, f"in {prepared.uri}"]))
    return pointers, dict(prepared.counts)


def _note_changes(run_uri: str, prepared: Prepared) -> None:
    """Write the changes in the run's data. A repeated step, which sees none, does not replace them."""
    store = open_storage(run_uri)
    if store.stat(CHANGES_FILE) and read_record(store, CHANGES_FILE)["fingerprint"] == prepared.fingerprint:
        return
    content = {
        "fingerprint": prepared.fingerprint,
        "changes": prepared.changes and asdict(prepared.changes),
        "chunks": prepared.chunks and asdict(prepared.chunks),
    }
    write_record(store, CHANGES_FILE, content, indent=1)


def shares_of(run_uri: str, tasks: int, fingerprint: str) -> list[str]:
    """The inputs of each task in one text.

    In a loop, kfp.local 2.17 passes the item to every input that comes from another step, not only to its own.
    """
    return [f"{task}/{tasks} {fingerprint} {run_uri}" for task in range(tasks)]


def read_share(share: str) -> tuple[int, int, str, str]:
    """Number of the task, of how many, the fingerprint of the prepared data, and the run's folder."""
    place, fingerprint, run_uri = share.split(" ", 2)
    task, _, tasks = place.partition("/")
    return int(task), int(tasks), fingerprint, run_uri


def point_to_features(job: JobConfig, prepared_uri: str) -> DataPointers:
    """Return whether the prepared data's features are cached, must be encoded first, or are not used.

    Encoding needs a frozen tower: the output of one that is trained changes.
    """
    uri = features_address(job)
    if not wants_cache(job):
        return DataPointers(prepared_uri=prepared_uri, features_uri=uri, features="off")
    from vlmpipe.trainer.data.shards.index import Index
    from vlmpipe.trainer.feature_cache.reader import FeatureShards

    images, store = Index.load(prepared_uri).unique_images(), FeatureShards(uri)
    if store.lost:
        text = f"{len(store.lost)} of the feature shards in {uri} are gone or cut (such as {store.lost[0]})"
        print_warning(f"{text}: their images are encoded again", step="prepare-data")
    features: Literal["encode", "reuse"] = "encode" if images.lacking(store.images.find).any() else "reuse"
    return DataPointers(prepared_uri=prepared_uri, features_uri=uri, features=features)


def wants_cache(job: JobConfig) -> bool:
    """Return whether a run trains on cached features."""
    is_possible = job.model.caches_if_auto and job.train.trainer is None
    return job.features.cache == "on" or (job.features.cache == "auto" and is_possible)


def features_address(job: JobConfig) -> str:
    """URI of the features of the run's tower; "" for a tower of random weights whose features are not cached.

    The address needs torch and transformers. That of a published tower is made in any case: what its settings lack is
    then found before training is started.
    """
    if not wants_cache(job) and not job.model.tower.weights:
        return ""
    from vlmpipe.trainer.feature_cache.store import features_uri

    return features_uri(job.run.features_root, job.model, job.train.precision)


def why_nothing_is_encoded(run_uri: str, features: str) -> str:
    """Why the step cache-features has nothing to do: `features` is reuse or off."""
    if features == "off":
        return "no cache: images are encoded while training"
    from vlmpipe.trainer.data.prepare.chunks.merge import IMAGES
    from vlmpipe.trainer.data.shards.prepared_files import Manifest

    pointers = DataPointers.read(open_storage(run_uri))
    images = Manifest.read(open_storage(pointers.prepared_uri)).counts.get(IMAGES)
    if images == 0:
        return "the data has no images: nothing to encode"
    return "every image has features already" + (f" ({images:,} images)" if images else "")


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
