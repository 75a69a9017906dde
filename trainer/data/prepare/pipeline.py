"""Data preparation: turns a source into checked, tokenized, sharded data, addressed by its content.

A large source is prepared in chunks by several processes and machines; finished chunks are reused. Tables that grow
with the data are kept on disk. DONE, written last, makes the prepared data exist.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmpipe.trainer.config.data import OWN_FORMAT, DataConfig
from vlmpipe.trainer.config.job import CHUNKS_FOLDER, PREPARED_FOLDER, JobConfig
from vlmpipe.trainer.data.accounting.coverage import COVERAGE, not_read
from vlmpipe.trainer.data.chat.encode import Chat
from vlmpipe.trainer.data.chat.make import format_identity, make_chat
from vlmpipe.trainer.data.exclusions.exclusion_file import read_exclusions
from vlmpipe.trainer.data.mixture import described_passes
from vlmpipe.trainer.data.prefixes.sharing import stores_prefixes
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
from vlmpipe.trainer.data.prepare.previews import REJECTS_FOLDER
from vlmpipe.trainer.data.prepare.scratch import scratch
from vlmpipe.trainer.data.prepare.statistics import unknown_slices
from vlmpipe.trainer.data.prepare.validate_sample import SampleValidator
from vlmpipe.trainer.data.rejects import KEPT, REJECTS, SUMMARY, rejected_for_tiles
from vlmpipe.trainer.data.replay.place import with_located_data
from vlmpipe.trainer.data.sample import Turn
from vlmpipe.trainer.data.shards.prepared_files import DONE, FORMAT, Manifest, OtherFormatError
from vlmpipe.trainer.data.sources import Source, open_source
from vlmpipe.trainer.data.tokenize import FOLDER as TOKENIZER
from vlmpipe.trainer.data.tokenize import LARGEST_TOKENIZER_BYTES, training_texts
from vlmpipe.trainer.errors import DataError, ExitCode, UserError
from vlmpipe.trainer.models.image_tokens import image_form_of, image_rule
from vlmpipe.trainer.models.published import stop_token_ids
from vlmpipe.trainer.progress import Progress
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.base import AlreadyExistsError, Storage, join_uri
from vlmpipe.trainer.storage.file_sums import UPLOADS, FileSum, damaged_files, files_below, upload_folder
from vlmpipe.trainer.storage.local import LocalStorage
from vlmpipe.trainer.storage.model_folders import local_folder
from vlmpipe.trainer.storage.regular_files import read_regular
from vlmpipe.trainer.storage.transfer import in_parallel

SAMPLES_VERSION = 13  # raise it when the same input gives other samples; of their files, `prepared_files.FORMAT`
TOKENIZER_SAMPLES = 200_000  # a tokenizer is trained on the first ones: its trainer holds every distinct word
# Settings that do not change the prepared bytes, and the source, whose own fingerprint covers its content.
NOT_IN_FINGERPRINT = {
    "source", "source_arguments", "sources", "stopping_strategy", "phases", "max_source_passes", "image_folder",
    "exclude", "pack", "shuffle_shards", "shard_cache_gib", "shard_reading", "train_share",
    "workers", "loader_threads", "tasks", "max_fetched_images", "max_fetched_gib", "max_fetch_hours",
    "share_prefix", "max_questions_per_image",
}  # fmt: skip


# Weights, and texts for people, beside a tokenizer.
NOT_TOKENIZER = {".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".gguf", ".md", ".png", ".jpg"}

# Fields that came later: at their defaults they leave the fingerprints of data prepared before as they were.
LATER_FIELDS = {
    "allowed_tokens", "columns", "slices", "fetch", "grey_bits", "file_splits", "max_image_share",
    "max_split_error", "max_media_bytes", "video", "video_frames", "video_fps", "video_times", "turns",
}  # fmt: skip


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
    identity = _fingerprint(config, source)
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
                if _fingerprint(config, now) != identity:
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
    for one in sources:
        unread.update(one["unread"])
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
    identity = _fingerprint(config, source)
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
            first, behind = (len(planned.chunks) * number // tasks for number in (task, task + 1))
            return planned.make(planned.chunks, progress, range(first, behind))
        except UserError as error:
            if error.expected == SourceChangedError.EXPECTED:
                forget_plan(config, identity)
            raise


def fingerprint(config: JobConfig) -> str:
    """Name of this run's prepared data, 32 hexadecimal digits, derived from all that decides its bytes."""
    config = with_located_data(config)
    return _fingerprint(config, open_source(config.data))


def find_prepared(config: JobConfig) -> str:
    """The run's prepared data. Raises UserError (66) where there is none."""
    uri = join_uri(config.run.prepared_root, fingerprint(config))
    if open_storage(uri).stat(DONE) is None:
        raise UserError(
            f"this data is not prepared yet: there is none in {uri}",
            expected="prepared data, which also has the tokenizer where one is trained on the texts",
            fix="run the run file once; vlmpipe data inspect RUN_FILE --prepare makes the data alone",
            code=ExitCode.NOT_FOUND,
        )
    return uri


def _fingerprint(config: JobConfig, source: Source) -> str:
    published = config.model.tokenizer_source
    tokenizer = local_folder(published.weights, published.revision, weights=False)
    files = sorted(filter(_decides_tokens, tokenizer.iterdir())) if tokenizer else []
    own_format = config.data.chat_format(config.model) == OWN_FORMAT  # which ends with the tokenizer's own token
    settings = {
        "format": SAMPLES_VERSION,
        "source": source.fingerprint(),
        "data": config.data.model_dump(exclude=NOT_IN_FINGERPRINT | (LATER_FIELDS - changed_fields(config.data))),
        "tokenizer": config.model.tokenizer,
        **({"tokenizer_revision": published.revision} if published.revision else {}),
        "chat_template": format_identity(config.model, config.data),
        "stop_tokens": [] if own_format else stop_token_ids(config.model.pretrained or config.model.language_model),
        "tokenizer_files": [hashlib.sha256(read_regular(path, LARGEST_TOKENIZER_BYTES)).hexdigest() for path in files],
        "image_tokens": image_rule(config.model),
        **({"pairs": True} if config.train.in_pairs else {}),
        **({"prefixes": True} if stores_prefixes(config) else {}),
        **({"exclude": excluded} if (excluded := read_exclusions(config.data.exclude).digest) else {}),
        **({"caption_questions": questions} if (questions := _caption_questions(config)) else {}),
        **({"source_columns": columns} if (columns := _columns(config)) else {}),
    }
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:32]


def _decides_tokens(path: Path) -> bool:
    """Return whether a file of a tokenizer's folder may decide tokens: all but weights and texts for people."""
    return path.is_file() and path.suffix.lower() not in NOT_TOKENIZER


def _caption_questions(config: JobConfig) -> dict[str, str]:
    """By source, where it has its own: it is written into each of the source's conversations."""
    return {
        str(source.name): source.caption_question for source in config.data.sources or () if source.caption_question
    }


def _columns(config: JobConfig) -> dict[str, dict[str, Any]]:
    """By source, where it has its own: what is read under which name."""
    named = {str(source.name): source.columns.model_dump(exclude_defaults=True) for source in config.data.sources}
    return {name: columns for name, columns in named.items() if columns}


def changed_fields(data: DataConfig) -> set[str]:
    """Names of the fields that are not at their defaults."""
    return {name for name, field in DataConfig.model_fields.items() if getattr(data, name) != field.default}


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
    found: dict[str, object] = json.loads((plan / COVERAGE).read_text(encoding="utf-8"))
    return found


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
