"""Data preparation: a source becomes checked, tokenized, sharded data, addressed by its content.

A large source is prepared in chunks, by several processes and machines, and a chunk that is done is never done again.
The tables that grow with the data are kept on disk. DONE comes last, so what lacks it does not exist.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from trainer.config.job import CHUNKS_FOLDER, PREPARED_FOLDER, JobConfig
from trainer.data.prepare.chunks.chunk import build_chunk
from trainer.data.prepare.chunks.merge import Part, Shard, merge
from trainer.data.prepare.chunks.plan import Chunk, Places, is_one_chunk, read_plan
from trainer.data.prepare.chunks.prepare import TOKENIZER, ChunkedPreparation, find_plan, make_plan, store_plan
from trainer.data.prepare.chunks.store import UPLOADS, files_in, upload_folder
from trainer.data.prepare.dataset_diff import Changes, changes_since_last
from trainer.data.prepare.thread_map import threads_for
from trainer.data.prepare.thumbnails import FOLDER as PICTURES
from trainer.data.prepare.validate_sample import SampleValidator
from trainer.data.rejects import KEPT, REJECTS, SUMMARY
from trainer.data.sample import Sample, Turn
from trainer.data.shards.prepared_files import DONE, FileSum, Manifest
from trainer.data.sources import Source, open_source
from trainer.data.tokenize import LARGEST_TOKENIZER_BYTES, load_tokenizer, make_tokenizer, training_texts
from trainer.errors import DataError, os_errors
from trainer.models.image_tokens import image_form_of, image_rule
from trainer.progress import Progress
from trainer.storage import open_storage
from trainer.storage.base import AlreadyExistsError, Storage, join_uri
from trainer.storage.local import LocalStorage
from trainer.storage.regular_files import read_regular

FORMAT_VERSION = 5  # raise it when the same input gives other bytes
TOKENIZER_SAMPLES = 200_000  # a tokenizer is trained on the first of them: its trainer holds every distinct word
# The source describes itself by content, not by its path; the others say how the data is read, and who prepares it.
NOT_IN_FINGERPRINT = {"source", "image_folder", "pack", "shuffle_shards", "shard_cache_gib", "workers", "tasks"}


@dataclass(frozen=True)
class ChunkCounts:
    """Of how many chunks a set is made, and how many were prepared for it now. A small set is one, prepared at once."""

    total: int = 1
    prepared: int = 1


@dataclass(frozen=True)
class Prepared:
    """Where prepared data lies and what it holds."""

    uri: str
    fingerprint: str
    reused: bool
    counts: dict[str, int]  # read, accepted, rejected, repaired, and samples of each split
    chunks: ChunkCounts | None = None  # None: all was there
    changes: Changes | None = None  # against the last set of this name and root; None: there is none


@dataclass(frozen=True)
class _Built:
    counts: dict[str, int]
    shards: list[Shard]  # which are not in the folder with the rest
    chunks: ChunkCounts


def prepare(config: JobConfig, progress: Progress) -> Prepared:
    """Prepare the run's data under `<root>/prepared/<fingerprint>`, or find it there.

    Raises DataError (exit 65) when more samples than `data.max_reject_fraction` are bad or a split is empty, and what
    `open_source` raises. Then nothing is stored but the chunks that are done, for the next attempt, and what was
    rejected, in the run's folder.
    """
    source = open_source(config.data)
    identity = _fingerprint(config, source)
    uri = join_uri(config.run.prepared_root, identity)
    storage = open_storage(uri)
    counts, chunks = _done_counts(storage), None
    reused = counts is not None
    if counts is None:
        with _scratch() as folder:
            try:
                built = _build(config, source, identity, folder, progress)
            except DataError:
                _keep_rejects(config, folder / "set")
                raise
            open_storage(config.run.run_uri).delete_folder(KEPT)  # of an attempt before
            counts, chunks = built.counts, built.chunks
            _publish(config, identity, folder / "set", built)
    return Prepared(uri, identity, reused, counts, chunks, changes_since_last(config, identity))


def plan_chunks(config: JobConfig, progress: Progress) -> int:
    """Cut the source into chunks for `prepare_share`. Returns how many there are: 0 where there is nothing to share."""
    source = open_source(config.data)
    identity = _fingerprint(config, source)
    if _done_counts(open_storage(join_uri(config.run.prepared_root, identity))) is not None:
        return 0
    with _scratch() as folder:
        planned = _planned(config, source, identity, folder, progress)
        return 0 if isinstance(planned, Chunk) else len(planned.chunks)


def prepare_share(config: JobConfig, task: int, tasks: int, progress: Progress) -> int:
    """Prepare every chunk whose number is `task` modulo `tasks`. Returns how many were not done yet."""
    source = open_source(config.data)
    with _scratch() as folder:
        if not find_plan(config, _fingerprint(config, source), folder):
            return 0
        planned = ChunkedPreparation(config, source, folder, FORMAT_VERSION)
        return planned.make(planned.chunks[task::tasks], progress)


def fingerprint(config: JobConfig) -> str:
    """Name of the prepared data of this run: 32 hexadecimal digits that change when its bytes would."""
    return _fingerprint(config, open_source(config.data))


def _fingerprint(config: JobConfig, source: Source) -> str:
    tokenizer = Path(config.model.tokenizer)
    files = sorted(path for path in tokenizer.glob("*.json")) if tokenizer.is_dir() else []
    settings = {
        "format": FORMAT_VERSION,
        "source": source.fingerprint(),
        "data": config.data.model_dump(exclude=NOT_IN_FINGERPRINT),
        "tokenizer": config.model.tokenizer,
        "tokenizer_files": [hashlib.sha256(read_regular(path, LARGEST_TOKENIZER_BYTES)).hexdigest() for path in files],
        "image_tokens": image_rule(config.model),
    }
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:32]


def _done_counts(storage: Storage) -> dict[str, int] | None:
    """Counts of prepared data that is there and whole. A DONE whose files are not is removed: they are made anew."""
    if storage.stat(DONE) is None:
        return None
    with suppress(DataError):
        manifest = Manifest.read(storage)
        if not manifest.damaged(storage):
            return manifest.counts
    storage.delete(DONE)
    return None


@contextmanager
def _scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="vlmpipe-prepare-") as scratch, os_errors(f"preparing data in {scratch}"):
        yield Path(scratch)


def _build(config: JobConfig, source: Source, identity: str, scratch: Path, progress: Progress) -> _Built:
    """Write everything but DONE and the shards of stored chunks into `scratch`/set."""
    plan, folder = scratch / "plan", scratch / "set"
    planned = _planned(config, source, identity, plan, progress)
    shutil.copytree(plan / TOKENIZER, folder / TOKENIZER)
    if isinstance(planned, Chunk):
        return _build_at_once(config, source, scratch, planned, progress)
    chunks, prepared = planned.chunks, planned.make(planned.chunks, progress)
    if config.data.duplicates == "drop":
        chunks = planned.without_repeats()
        prepared += planned.make(chunks, progress)
    tile_tokens = image_form_of(config.model).tile_tokens
    counts, shards = merge(planned.parts(chunks), folder, config.data, tile_tokens)
    return _Built(counts, shards, ChunkCounts(len(chunks), prepared))


def _planned(
    config: JobConfig, source: Source, identity: str, folder: Path, progress: Progress
) -> ChunkedPreparation | Chunk:
    """The source as chunks, or the one chunk that a small source is. Afterwards the tokenizer is in `folder`."""
    if not find_plan(config, identity, _made(folder)):
        records = make_plan(config, source, folder, progress)
        _tokenizer(config, source, folder, records, progress).save_pretrained(folder / TOKENIZER)
        if is_one_chunk(records, config.data.chunk_samples):
            return next(read_plan(folder))
        store_plan(config, identity, folder)
    return ChunkedPreparation(config, source, folder, FORMAT_VERSION)


def _build_at_once(config: JobConfig, source: Source, scratch: Path, planned: Chunk, progress: Progress) -> _Built:
    """A source of one chunk is not kept as a chunk: there is nothing to share and little to save."""
    folder, chunk = scratch / "set", _made(scratch / "chunk")

    def report(read: int, rejected: int) -> None:
        progress.update(read, planned.records, unit="samples", message=f"{rejected} rejected")

    examine = SampleValidator(config, load_tokenizer(open_storage(str(folder)), TOKENIZER))
    entries = planned.entries(iter(source), config.data.source)
    build_chunk(entries, chunk, config.data, examine, threads=threads_for(1), report=report)
    tile_tokens = image_form_of(config.model).tile_tokens
    part = Part("", LocalStorage(chunk), Places(scratch / "plan").of(planned))
    counts, shards = merge([part], folder, config.data, tile_tokens)
    for shard in shards:
        (chunk / shard.name).rename(folder / shard.new_name)
    return _Built(counts, [], ChunkCounts())


def _made(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    return folder


def _tokenizer(config: JobConfig, source: Source, plan: Path, records: int, progress: Progress) -> Any:
    """The tokenizer that the run file names, or one that is trained on the texts of the training split."""
    form = image_form_of(config.model)

    def turns() -> Iterator[Turn]:
        splits = chain.from_iterable(chunk.splits() for chunk in read_plan(plan))
        taken = 0
        for read, (sample, split) in enumerate(zip(source, splits, strict=False), 1):
            progress.update(read, records, unit="samples", message="reading texts")
            if isinstance(sample, Sample) and split == "train":
                yield from sample.turns
                taken += 1
                if taken == TOKENIZER_SAMPLES:
                    return

    return make_tokenizer(
        config.model.tokenizer,
        training_texts(turns()),
        form.mark,
        control_tokens=form.control_tokens,
        has_mark=form.is_in_tokenizer,
    )


def _keep_rejects(config: JobConfig, folder: Path) -> None:
    """Put what is known of a failed preparation's rejects into the run's folder, for people."""
    run = open_storage(config.run.run_uri)
    for name, path in files_in(folder).items():
        if name in (REJECTS, SUMMARY) or name.startswith(PICTURES):
            run.upload(path, f"{KEPT}/{name}")


def _publish(config: JobConfig, identity: str, folder: Path, built: _Built) -> None:
    """Upload what was built, add the chunks' shards, remove what an interrupted build has left, and create DONE."""
    storage = open_storage(join_uri(config.run.prepared_root, identity))
    files = {name: FileSum.of(path) for name, path in files_in(folder).items()}
    upload_folder(storage, folder, {name: (sums.bytes, sums.crc32c) for name, sums in files.items()})
    files |= {shard.new_name: FileSum(shard.bytes, shard.crc32c) for shard in built.shards}
    root = open_storage(config.run.root_uri)
    with ThreadPoolExecutor(UPLOADS, "copy") as pool:
        old = [f"{CHUNKS_FOLDER}/{shard.chunk}/{shard.name}" for shard in built.shards]
        new = [f"{PREPARED_FOLDER}/{identity}/{shard.new_name}" for shard in built.shards]
        for _ in pool.map(root.copy, old, new):
            pass
    for info in storage.list():
        if info.name not in files and info.name != DONE:
            storage.delete(info.name)
    manifest = Manifest(FORMAT_VERSION, identity, built.counts, files)
    # Another run may have prepared the same data meanwhile; equal input gives equal bytes, so its DONE is as good.
    with suppress(AlreadyExistsError):
        storage.create(DONE, manifest.to_bytes())
