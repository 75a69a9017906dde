"""Chunked preparation of a source: plans its chunks and prepares those that are missing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path

import pyarrow.parquet as pq

from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.data.accounting.coverage import COVERAGE, Coverages
from vlmpipe.trainer.data.chat.encode import Chat
from vlmpipe.trainer.data.exclusions.exclusion_file import read_exclusions
from vlmpipe.trainer.data.prefixes.sharing import stores_prefixes
from vlmpipe.trainer.data.prepare.chunks.chunk import ChunkMaker
from vlmpipe.trainer.data.prepare.chunks.merge import Part
from vlmpipe.trainer.data.prepare.chunks.plan import PARTS, Chunk, Places, StoredChunks, read_plan, write_plan
from vlmpipe.trainer.data.prepare.chunks.store import ChunkStore
from vlmpipe.trainer.data.prepare.chunks.worker_pool import cores, make_in_processes, threads_for
from vlmpipe.trainer.data.prepare.digest_files import DigestFiles, digest_bytes, digests_of, repeat_before
from vlmpipe.trainer.data.sample import stable_digest
from vlmpipe.trainer.data.shards.index_lines import LINES
from vlmpipe.trainer.data.sources import Source
from vlmpipe.trainer.data.sources.base import counted
from vlmpipe.trainer.data.sqlite_table import disk_table
from vlmpipe.trainer.models.image_tokens import image_form_of, image_rule
from vlmpipe.trainer.progress import Progress
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.file_sums import UPLOADS
from vlmpipe.trainer.storage.transfer import in_parallel

DISTINCT = "distinct.jsonl"  # the plan's chunks with `repeats`, while a set is prepared
PLANS = "chunk-plans"  # folder in the chunk store, by the prepared set's fingerprint
# Settings that do not change a chunk's bytes, given its records, which the plan decides.
NOT_IN_A_CHUNK = {
    "source", "sources", "stopping_strategy", "phases", "image_folder", "pack", "shuffle_shards", "shard_cache_gib",
    "shard_reading", "max_samples", "train_share", "turns", "share_prefix", "max_questions_per_image",
    "max_media_bytes", "video", "video_frames", "video_fps", "max_reject_fraction", "chunk_samples",
    "workers", "loader_threads", "tasks", "max_source_passes", "split_by", "validation_fraction", "file_splits",
    "max_image_share", "max_split_error", "exclude",
    "fetch", "max_fetched_images", "max_fetched_gib", "max_fetch_hours",
}  # fmt: skip

MIN_CHUNKS, MIN_RECORDS = 2, 1_000  # for each process, which takes as long to start as some 400 records take


def processes_for(chunks: int, records: int) -> int:
    """Return the number of processes that prepare this many chunks and records, where data.workers does not say.

    0 or 1: this process.
    """
    return min(cores(), chunks // MIN_CHUNKS, records // MIN_RECORDS)


class ChunkedPreparation:
    """The chunks of one source. `folder` holds the plan, with the tokenizer in it."""

    def __init__(self, config: JobConfig, source: Source, folder: Path, format_version: int) -> None:
        self._config, self._source, self._folder = config, source, folder
        self._store = ChunkStore(config.run.chunks_root)
        self._chat = Chat.load(open_storage(str(folder)), image_form_of(config.model))
        self._settings = _settings(config, self._chat, format_version)
        self.chunks = read_plan(folder)

    def make(self, chunks: StoredChunks, progress: Progress, numbers: range | None = None) -> int:
        """Prepare the chunks of these numbers, or all, that are not done yet. Returns how many."""
        total, to_read = 0, 0
        missing: list[int] = []
        asked = ((number, chunks[number]) for number in (range(len(chunks)) if numbers is None else numbers))
        for number, records, is_there in in_parallel(self._is_there, asked, threads=UPLOADS):
            total += records
            if not is_there:
                missing.append(number)
                to_read += records
        todo = (chunks[number] for number in missing)
        tally = _Tally(progress, total, total - to_read)
        workers = min(self._config.data.workers or processes_for(len(missing), to_read), len(missing))
        threads = threads_for(max(1, workers))
        if workers > 1:
            job = {
                "config": self._config.model_dump_json(),
                "plan": str(self._folder),
                "settings": self._settings,
                "threads": threads,
            }
            make_in_processes(todo, job, workers, report=tally)
        elif missing:
            maker = ChunkMaker(self._config, self._source, self._folder, self._chat, self._settings, threads)
            for chunk in todo:
                maker.make(chunk, partial(tally, chunk.number))
        return len(missing)

    def _is_there(self, chunk: tuple[int, Chunk]) -> tuple[int, int, bool]:
        """Number of the chunk, its records, and whether it is done."""
        number, of_number = chunk
        return number, of_number.records, self._store.holds(of_number.fingerprint(self._settings))

    def without_repeats(self) -> StoredChunks:
        """The chunks without the samples of earlier chunks. All planned chunks must be done."""
        contents = DigestFiles(summed=False)
        for chunk in self.chunks:
            contents.add(digests_of(sorted(self._contents(chunk))), first=chunk.number)
        repeats = disk_table("CREATE TABLE repeats (chunk INTEGER, content TEXT)")
        for rows in contents:
            again = rows[repeat_before(rows)]
            repeats.executemany(
                "INSERT INTO repeats VALUES (?, ?)",
                zip(again["first"].tolist(), (digest.hex() for digest in digest_bytes(again)), strict=True),
            )
        repeats.execute("CREATE INDEX by_chunk ON repeats (chunk)")
        with (self._folder / DISTINCT).open("w", encoding="utf-8") as lines:
            for chunk in self.chunks:
                of_chunk = repeats.execute("SELECT content FROM repeats WHERE chunk = ?", (chunk.number,))
                lines.write(chunk.without(content for (content,) in of_chunk).to_json() + "\n")
        return StoredChunks(self._folder / DISTINCT)

    def parts(self, chunks: Iterable[Chunk]) -> Iterator[Part]:
        """These chunks, which must be done, as parts of the whole."""
        places = Places(self._folder)
        for chunk in chunks:
            name = chunk.fingerprint(self._settings)
            yield Part(name, self._store.files(name), places.of(chunk))

    def _contents(self, chunk: Chunk) -> set[bytes]:
        """The distinct contents of the chunk's samples."""
        path = self._store.files(chunk.fingerprint(self._settings)).fetch(LINES)
        return set(map(bytes.fromhex, pq.read_table(path, columns=["content"]).column("content").to_pylist()))


class _Tally:
    """Progress over all chunks."""

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
    """Fetch the stored plan of this prepared set, if there is one."""
    return ChunkStore(config.run.chunks_root).get(f"{PLANS}/{identity}", folder)


def forget_plan(config: JobConfig, identity: str) -> None:
    """Delete the stored plan of this prepared set: it was made of other bytes."""
    ChunkStore(config.run.chunks_root).forget(f"{PLANS}/{identity}")


def make_plan(config: JobConfig, source: Source, folder: Path, progress: Progress) -> int:
    """Read the source once, with its images, and write the plan. Returns the number of records.

    Raises DataError where the records have media that nothing reads.
    """
    part_starts: list[int] = []
    coverages, notes = Coverages(config.data), list[str]()
    records = islice(counted(source.parts(), part_starts), config.data.max_samples or None)
    reading = write_plan(
        coverages.counting(records),
        folder,
        config.data,
        threads=threads_for(1),
        borders=lambda: {part_starts[part] for part in source.first_parts() if part < len(part_starts)},
        notes=notes,
        excluded=read_exclusions(config.data.exclude),
    )
    read = 0
    for read in reading:
        progress.update(read, unit="samples", message="reading records and their images")
    coverages.check()
    notes = [*source.notes(), *notes]
    (folder / PARTS).write_text(json.dumps(part_starts), encoding="utf-8")
    (folder / COVERAGE).write_text(json.dumps({"sources": coverages.as_json(), "notes": notes}), encoding="utf-8")
    return read


def store_plan(config: JobConfig, identity: str, folder: Path) -> None:
    """Store the plan and the tokenizer in `folder` for all tasks that prepare its chunks."""
    ChunkStore(config.run.chunks_root).put(f"{PLANS}/{identity}", folder)


def _settings(config: JobConfig, chat: Chat, format_version: int) -> str:
    """A hash of all that decides a chunk's files beside its records."""
    data = config.data.model_dump(mode="json", exclude=NOT_IN_A_CHUNK)
    tokenizer = chat.tokenizer
    specials = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.all_special_tokens)
    template = (chat.template.source, chat.end_tokens, chat.as_text)
    tokens = stable_digest(tokenizer.backend_tokenizer.to_str(), specials, template)
    has = {
        "pairs": config.train.in_pairs,
        "prefixes": stores_prefixes(config),
        "turns": config.data.turns == "independent",
    }
    forms = [form for form, is_so in has.items() if is_so]
    return stable_digest(format_version, json.dumps(data, sort_keys=True), tokens, image_rule(config.model), *forms)
