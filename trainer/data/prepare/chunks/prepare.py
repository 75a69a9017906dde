"""Chunked preparation of a source: plans its chunks and prepares those that are missing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq

from trainer.config.job import JobConfig
from trainer.data.prepare.chunks.builder import ChunkMaker
from trainer.data.prepare.chunks.merge import Part
from trainer.data.prepare.chunks.plan import Chunk, Places, read_plan, write_plan
from trainer.data.prepare.chunks.store import ChunkStore
from trainer.data.prepare.chunks.worker_pool import make_in_processes
from trainer.data.prepare.deduplicate import ContentIndex
from trainer.data.prepare.thread_map import cores, threads_for
from trainer.data.sample import stable_digest
from trainer.data.shards.index import NAME
from trainer.data.sources import Source
from trainer.data.sources.base import counted
from trainer.data.tokenize import load_tokenizer
from trainer.models.image_tokens import image_rule
from trainer.progress import Progress
from trainer.storage import open_storage

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TOKENIZER = "tokenizer"
PLANS = "chunk-plans"  # folder in the chunk store, by the prepared set's fingerprint
PARTS = "parts.json"  # number of the first record of each of the source's parts
# What does not decide a chunk's bytes, given its records. Which records there are is in the plan.
NOT_IN_A_CHUNK = {
    "source", "image_folder", "pack", "shuffle_shards", "shard_cache_gib", "max_samples", "max_reject_fraction",
    "chunk_samples", "workers", "tasks", "split_by", "validation_fraction",
}  # fmt: skip


class ChunkedPreparation:
    """The chunks of one source. `folder` holds the plan, with the tokenizer in it."""

    def __init__(self, config: JobConfig, source: Source, folder: Path, format_version: int) -> None:
        self._config, self._source, self._folder = config, source, folder
        self._store = ChunkStore(config.run.chunks_root)
        self._tokenizer = load_tokenizer(open_storage(str(folder)), TOKENIZER)
        self._settings = _settings(config, self._tokenizer, format_version)
        self.chunks = tuple(read_plan(folder))
        self._part_starts: list[int] = json.loads((folder / PARTS).read_text())

    def make(self, chunks: Sequence[Chunk], progress: Progress) -> int:
        """Prepare those that are not done yet. Returns how many these were."""
        todo = [chunk for chunk in chunks if not self._store.holds(chunk.fingerprint(self._settings))]
        total, to_read = (sum(chunk.records for chunk in group) for group in (chunks, todo))
        tally = _Tally(progress, total, total - to_read)
        # A process takes seconds to begin, so it gets two chunks at least, unless a number is asked for.
        workers = min(self._config.data.workers or min(cores(), len(todo) // 2), len(todo))
        threads = threads_for(max(1, workers))
        if workers > 1:
            make_in_processes(
                todo,
                self._config,
                workers=workers,
                threads=threads,
                part_starts=self._part_starts,
                tokenizer=self._folder / TOKENIZER,
                settings=self._settings,
                report=tally,
            )
        elif todo:
            maker = ChunkMaker(self._config, self._source, self._part_starts, self._tokenizer, self._settings, threads)
            for chunk in todo:
                maker.make(chunk, partial(tally, chunk.number))
        return len(todo)

    def without_repeats(self) -> tuple[Chunk, ...]:
        """The chunks without the samples that chunks before them have. Those as planned must be done."""
        seen = ContentIndex()
        return tuple(chunk.without(self._met(chunk, seen)) for chunk in self.chunks)

    def parts(self, chunks: Iterable[Chunk]) -> Iterator[Part]:
        """What these chunks, which must be done, add to the whole."""
        places = Places(self._folder)
        for chunk in chunks:
            name = chunk.fingerprint(self._settings)
            yield Part(name, self._store.files(name), places.of(chunk))

    def _met(self, chunk: Chunk, seen: ContentIndex) -> set[str]:
        """The chunk's contents that were seen before it; all of them are seen then."""
        path = self._store.files(chunk.fingerprint(self._settings)).fetch(NAME)
        columns = (column.to_pylist() for column in pq.read_table(path, columns=["content", "split"]).columns)
        met = set()
        for content, split in zip(*columns, strict=True):
            digest = bytes.fromhex(content)
            if digest in seen:
                met.add(content)
            seen.add(digest, split)
        return met


class _Tally:
    """Records of all chunks together, whoever prepares them."""

    def __init__(self, progress: Progress, total: int, done: int) -> None:
        self._progress, self._total = progress, total
        self._read, self._rejected = done, 0
        self._of: dict[int, tuple[int, int]] = {}

    def __call__(self, number: int, read: int, rejected: int) -> None:
        read_before, rejected_before = self._of.get(number, (0, 0))
        self._of[number] = (read, rejected)
        self._read += read - read_before
        self._rejected += rejected - rejected_before
        self._progress.update(self._read, self._total, unit="samples", message=f"{self._rejected} rejected")


def find_plan(config: JobConfig, identity: str, folder: Path) -> bool:
    """Fetch the plan that was made for this prepared set, if there is one."""
    return ChunkStore(config.run.chunks_root).get(f"{PLANS}/{identity}", folder)


def make_plan(config: JobConfig, source: Source, folder: Path, progress: Progress) -> int:
    """Read the source once, with its images, and write where it is cut. Returns how many records there are."""
    part_starts: list[int] = []
    reading = write_plan(
        islice(counted(source.parts(), part_starts), config.data.max_samples or None),
        folder,
        split_by=config.data.split_by,
        validation_fraction=config.data.validation_fraction,
        chunk_samples=config.data.chunk_samples,
        threads=threads_for(1),
        max_image_bytes=config.data.max_image_bytes,
    )
    read = 0
    for read in reading:
        progress.update(read, unit="samples", message="reading records and their images")
    (folder / PARTS).write_text(json.dumps(part_starts))
    return read


def store_plan(config: JobConfig, identity: str, folder: Path) -> None:
    """Keep the plan, with the tokenizer that is in `folder` by now, for all who prepare chunks of it."""
    ChunkStore(config.run.chunks_root).put(f"{PLANS}/{identity}", folder)


def _settings(config: JobConfig, tokenizer: PreTrainedTokenizerFast, format_version: int) -> str:
    """A hash of what decides a chunk's files beside its records."""
    data = config.data.model_dump(mode="json", exclude=NOT_IN_A_CHUNK)
    specials = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.all_special_tokens)
    tokens = stable_digest(tokenizer.backend_tokenizer.to_str(), specials)
    return stable_digest(format_version, json.dumps(data, sort_keys=True), tokens, image_rule(config.model))
