"""The run's prepared data: made by a step, shared among tasks, and with or without cached features."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Literal

from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.errors import print_warning
from vlmpipe.trainer.records.prepared import CHANGES_FILE, DataPointers
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.records import read_record, write_record

if TYPE_CHECKING:
    from vlmpipe.trainer.data.prepare.pipeline import Prepared
    from vlmpipe.trainer.progress import Progress


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
