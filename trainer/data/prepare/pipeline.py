"""Data preparation: turns a source into checked, tokenized, sharded data, addressed by its content.

A large source is prepared in chunks by several processes and machines; finished chunks are reused. Tables that grow
with the data are kept on disk. DONE, written last, makes the prepared data exist.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.config.job import CHUNKS_FOLDER, PREPARED_FOLDER, JobConfig
from vlmpipe.trainer.data.accounting.coverage import COVERAGE, not_read
from vlmpipe.trainer.data.chat.encode import Chat
from vlmpipe.trainer.data.chat.run_chat import make_chat
from vlmpipe.trainer.data.exclusions.exclusion_file import read_exclusions
from vlmpipe.trainer.data.mixture import described_passes
from vlmpipe.trainer.data.prepare.chunks.chunk import build_chunk
from vlmpipe.trainer.data.prepare.chunks.merge import STATS, Part, Shard, merge
from vlmpipe.trainer.data.prepare.chunks.plan import SMALLEST, Chunk, Places, planned_samples, read_plan
from vlmpipe.trainer.data.prepare.chunks.prepare import (
    ChunkedPreparation,
    find_plan,
    forget_plan,
    make_plan,
    store_plan,
)
from vlmpipe.trainer.data.prepare.chunks.witness import SourceChangedError
from vlmpipe.trainer.data.prepare.chunks.worker_pool import threads_for
from vlmpipe.trainer.data.prepare.dataset_diff import Changes, changes_since_last
from vlmpipe.trainer.data.prepare.fetch_images import fetch_images
from vlmpipe.trainer.data.prepare.fingerprint import SAMPLES_VERSION, fingerprint_of
from vlmpipe.trainer.data.prepare.previews import REJECTS_FOLDER
from vlmpipe.trainer.data.prepare.scratch import scratch
from vlmpipe.trainer.data.prepare.statistics import unknown_slices
from vlmpipe.trainer.data.prepare.validation.validate_sample import SampleValidator
from vlmpipe.trainer.data.rejects import KEPT, REJECTS, SUMMARY, rejected_for_tiles
from vlmpipe.trainer.data.replay.place import with_located_data
from vlmpipe.trainer.data.sample import Turn
from vlmpipe.trainer.data.shards.prepared_files import DONE, FORMAT, Manifest, OtherFormatError
from vlmpipe.trainer.data.sources import Source, open_source
from vlmpipe.trainer.data.tokenize import FOLDER as TOKENIZER
from vlmpipe.trainer.data.tokenize import training_texts
from vlmpipe.trainer.errors import DataError, ExitCode, UserError
from vlmpipe.trainer.models.image_tokens import image_form_of
from vlmpipe.trainer.progress import Progress
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.base import AlreadyExistsError, Storage, join_uri
from vlmpipe.trainer.storage.file_sums import UPLOADS, FileSum, damaged_files, files_below, upload_folder
from vlmpipe.trainer.storage.local import LocalStorage
from vlmpipe.trainer.storage.transfer import in_parallel

TOKENIZER_SAMPLES = 200_000  # a tokenizer is trained on the first ones: its trainer holds every distinct word


@dataclass(frozen=True)
class ChunkCounts:
    """Chunks of a prepared set, and how many of them were prepared now. A small set is a single chunk."""

    total: int = 1
    prepared: int = 1


@dataclass(frozen=True)
class Prepared:
    """Location and content of prepared data."""

    uri: str
    fingerprint: str
    reused: bool
    counts: dict[str, int]  # read, accepted, rejected, repaired, samples of each split, images, samples without one
    notes: str = ""  # keys that nothing read, with their shares, and further sentences; begins with "; "
    chunks: ChunkCounts | None = None  # None: the set was reused
    changes: Changes | None = None  # against the last set of this name and root, if any


@dataclass(frozen=True)
class _Built:
    counts: dict[str, int]
    shards: list[Shard]  # still in their chunks' folders
    chunks: ChunkCounts


def prepare(config: JobConfig, progress: Progress) -> Prepared:
    """Prepare the run's data under `<root>/prepared/<fingerprint>`, or reuse it.

    Raises DataError (exit 65) when more samples than `data.max_reject_fraction` are bad or a split is empty, and what
    `open_source` raises. A failed preparation leaves only finished chunks and, in the run's folder, its rejects.
    """
    config = with_located_data(config)
    fetched = fetch_images(config, progress).sentence() if config.data.fetch else ""
    source = open_source(config.data)
    identity = fingerprint_of(config, source)
    uri = join_uri(config.run.prepared_root, identity)
    storage = open_storage(uri)
    counts, chunks = _done_counts(storage), None
    reused = counts is not None
    if counts is None:
        with scratch() as folder:
            try:
                built = _build(config, source, identity, folder, progress)
                now = open_source(config.data)
                now.recall(source)
                if fingerprint_of(config, now) != identity:
                    raise SourceChangedError(config.data.described())
            except UserError as error:
                if error.expected == SourceChangedError.EXPECTED:
                    forget_plan(config, identity)
                if error.code == ExitCode.DATA:
                    _keep_rejects(config, folder / "set")
                raise
            open_storage(config.run.run_uri).delete_folder(KEPT)  # of an attempt before
            counts, chunks = built.counts, built.chunks
            _publish(config, identity, folder / "set", built)
    notes = _notes(json.loads(storage.read(STATS)), config.data) + (f"; {fetched}" if fetched else "")
    rejects = json.loads(storage.read(SUMMARY))
    tiles = rejected_for_tiles(rejects["by_code"], rejects["examples"])
    notes += "".join(f"; {note}" for note in [*unknown_slices(uri, config.data.slices), *tiles])
    changes = None
    try:
        changes = changes_since_last(config, identity)
    except OtherFormatError as error:
        notes += f"; no comparison with the data before: {error.found} ({error.fix})"
    return Prepared(uri, identity, reused, counts, notes, chunks, changes)


def _notes(stats: dict[str, Any], data: DataConfig) -> str:
    """Describe unread keys of all sources, decisions about them, and how often an epoch reads each."""
    coverage = stats.get("coverage", {})
    unread: Counter[str] = Counter()
    sources = coverage.get("sources", {}).values()
    for prepared in sources:
        unread.update(prepared["unread"])
    keys = not_read(dict(unread), sum(source["samples"] for source in sources))
    near = stats["near_duplicates"]
    similar = f"{near['eval_images']:,} of {near['searched']:,} validation images look like training images"
    notes = [*coverage.get("notes", ()), *filter(None, [mixture_note(stats, data), near["eval_images"] and similar])]
    return keys + "".join(f"; {note}" for note in notes)


def mixture_note(stats: dict[str, Any], data: DataConfig) -> str:
    """How often an epoch of prepared data reads each of several sources; "" for one. Raises DataError for one that it
    reads too often.
    """
    if not data.sources:
        return ""
    return described_passes(data, [of_splits["train"]["samples"] for of_splits in stats["sources"].values()])


@dataclass(frozen=True)
class PlannedChunks:
    """Chunks that tasks may share, 0 where there is nothing to share; `fingerprint`: of the prepared data."""

    chunks: int
    fingerprint: str


def plan_chunks(config: JobConfig, progress: Progress) -> PlannedChunks:
    """Plan the source's chunks for `prepare_share`."""
    config = with_located_data(config)
    if config.data.fetch:
        fetch_images(config, progress)
    source = open_source(config.data)
    identity = fingerprint_of(config, source)
    if _done_counts(open_storage(join_uri(config.run.prepared_root, identity))) is not None:
        return PlannedChunks(0, identity)
    with scratch() as folder:
        planned = _planned(config, source, identity, folder, progress)
        return PlannedChunks(0 if isinstance(planned, Chunk) else len(planned.chunks), identity)


def prepare_share(config: JobConfig, identity: str, task: int, tasks: int, progress: Progress) -> int:
    """Prepare the chunks of one of `tasks` shares. Returns how many were missing.

    A share's chunks are consecutive: each task then reads the source's files that hold them, and no others. So it takes
    the fingerprint from `plan_chunks`, for which all records may be read; a change is found in the chunks.
    """
    config = with_located_data(config)
    source = open_source(config.data)
    with scratch() as folder:
        if not find_plan(config, identity, folder):
            return 0
        planned = ChunkedPreparation(config, source, folder, SAMPLES_VERSION)
        try:
            first, end = (len(planned.chunks) * number // tasks for number in (task, task + 1))
            return planned.make(planned.chunks, progress, range(first, end))
        except UserError as error:
            if error.expected == SourceChangedError.EXPECTED:
                forget_plan(config, identity)
            raise


def _done_counts(storage: Storage) -> dict[str, int] | None:
    """Counts of existing undamaged prepared data. Removes DONE of damaged data, which is then prepared again.

    Raises OtherFormatError for data of another format, which is not touched.
    """
    if storage.stat(DONE) is None:
        return None
    with suppress(DataError):
        manifest = Manifest.read(storage)
        if not damaged_files(storage, manifest.files):
            return manifest.counts
    storage.delete(DONE)
    return None


def _build(config: JobConfig, source: Source, identity: str, place: Path, progress: Progress) -> _Built:
    """Write everything but DONE and the shards of stored chunks into `place`/set."""
    plan, folder = place / "plan", place / "set"
    planned = _planned(config, source, identity, plan, progress)
    shutil.copytree(plan / TOKENIZER, folder / TOKENIZER)
    if isinstance(planned, Chunk):
        return _build_at_once(config, source, place, planned, progress)
    chunks, prepared = planned.chunks, planned.make(planned.chunks, progress)
    if config.data.duplicates == "drop":
        chunks = planned.without_repeats()
        prepared += planned.make(chunks, progress)
    counts, shards = merge(planned.parts(chunks), folder, config.data, _coverage(plan), listed=_listed(config))
    return _Built(counts, shards, ChunkCounts(len(chunks), prepared))


def _coverage(plan: Path) -> dict[str, object]:
    coverage: dict[str, object] = json.loads((plan / COVERAGE).read_text(encoding="utf-8"))
    return coverage


def _planned(
    config: JobConfig, source: Source, identity: str, folder: Path, progress: Progress
) -> ChunkedPreparation | Chunk:
    """The source's chunks, or the single chunk of a small source. Writes the tokenizer into `folder`."""
    folder.mkdir(exist_ok=True)
    if not find_plan(config, identity, folder):
        records = make_plan(config, source, folder, progress)
        _chat(config, source, folder, records, progress).save(folder / TOKENIZER)
        if records <= SMALLEST * config.data.chunk_samples and len(config.data.sources) <= 1:  # never cut
            return read_plan(folder)[0]
        store_plan(config, identity, folder)
    return ChunkedPreparation(config, source, folder, SAMPLES_VERSION)


def _build_at_once(config: JobConfig, source: Source, place: Path, planned: Chunk, progress: Progress) -> _Built:
    """Prepare a source of one chunk without the chunk store."""
    folder, chunk = place / "set", place / "chunk"
    chunk.mkdir()

    def report(read: int, rejected: int) -> None:
        progress.update(read, planned.records, unit="samples", message=f"{rejected} rejected")

    validator = SampleValidator(config, Chat.load(LocalStorage(folder), image_form_of(config.model)))
    excluded = read_exclusions(config.data.exclude)
    entries = planned.entries(iter(source), config.data.described(), excluded)
    content = build_chunk(entries, chunk, config.data, validator, threads=threads_for(1), report=report)
    if content != planned.content:
        raise SourceChangedError(config.data.described())
    part = Part("", LocalStorage(chunk), Places(place / "plan").of(planned))
    counts, shards = merge([part], folder, config.data, _coverage(place / "plan"), listed=_listed(config))
    for shard in shards:
        (chunk / shard.name).rename(folder / shard.new_name)
    return _Built(counts, [], ChunkCounts())


def _chat(config: JobConfig, source: Source, plan: Path, records: int, progress: Progress) -> Chat:
    """The run's chat. A tokenizer is trained on the texts of the training split where the run file asks for one."""

    excluded = read_exclusions(config.data.exclude).ids

    def turns() -> Iterator[Turn]:
        taken = 0
        for read, (sample, split) in enumerate(planned_samples(source, plan, excluded), 1):
            progress.update(read, records, unit="samples", message="reading texts")
            if split == "train":
                yield from sample.turns
                taken += 1
                if taken == TOKENIZER_SAMPLES:
                    return

    return make_chat(config.model, config.data, training_texts(turns()))


def _listed(config: JobConfig) -> str:
    """Where `_keep_rejects` puts the list."""
    return join_uri(config.run.run_uri, f"{KEPT}/{REJECTS}")


def _keep_rejects(config: JobConfig, folder: Path) -> None:
    """Copy the rejects of a failed preparation into the run's folder, for people."""
    run = open_storage(config.run.run_uri)
    for name, path in files_below(folder).items():
        if name in (REJECTS, SUMMARY) or name.startswith(REJECTS_FOLDER):
            run.upload(path, f"{KEPT}/{name}")


def _publish(config: JobConfig, identity: str, folder: Path, built: _Built) -> None:
    """Upload the built files, copy the chunks' shards, remove leftovers of an interrupted build, and create DONE."""
    storage, root = open_storage(join_uri(config.run.prepared_root, identity)), open_storage(config.run.root_uri)
    files = upload_folder(storage, folder)

    def copy(shard: Shard) -> tuple[str, FileSum]:
        root.copy(f"{CHUNKS_FOLDER}/{shard.chunk}/{shard.name}", f"{PREPARED_FOLDER}/{identity}/{shard.new_name}")
        return shard.new_name, FileSum(shard.bytes, shard.crc32c)

    files |= in_parallel(copy, built.shards, threads=UPLOADS)
    manifest = Manifest(FORMAT, identity, built.counts, files).in_pages(storage)
    for info in storage.list():
        if info.name not in files and info.name not in manifest.page_names and info.name != DONE:
            storage.delete(info.name)
    # Another run may have prepared the same data meanwhile: equal input gives equal bytes.
    with suppress(AlreadyExistsError):
        storage.create(DONE, manifest.to_bytes())
