"""Prepares one chunk: consecutive records, with shards, an index and counts of their own.

A chunk's files do not depend on its place in the source, so they are reused wherever the same records come again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.data.chat.encode import Chat
from vlmpipe.trainer.data.exclusions.exclusion_file import read_exclusions
from vlmpipe.trainer.data.malloc_trim import trim_memory
from vlmpipe.trainer.data.near_duplicates.table import SignatureWriter
from vlmpipe.trainer.data.prepare.chunks.plan import PARTS, RECORDS_AHEAD, Chunk
from vlmpipe.trainer.data.prepare.chunks.store import ChunkStore
from vlmpipe.trainer.data.prepare.chunks.witness import SourceChangedError, Witness
from vlmpipe.trainer.data.prepare.previews import ContactSheet, write_reject_images
from vlmpipe.trainer.data.prepare.scratch import scratch
from vlmpipe.trainer.data.prepare.validation.deduplicate import AnswerCounts
from vlmpipe.trainer.data.prepare.validation.final_ids import Entry
from vlmpipe.trainer.data.prepare.validation.validate_sample import Accepted, SampleValidator, image_bytes, is_short
from vlmpipe.trainer.data.rejects import REJECTS, Ledger, Reject, RejectCode
from vlmpipe.trainer.data.sample import SPLITS, Sample, sample_digest
from vlmpipe.trainer.data.shards.index_lines import PAIR_COLUMNS, PREFIX_COLUMNS, VIDEO_COLUMNS, IndexLines
from vlmpipe.trainer.data.shards.tar import ShardWriter, key_of, sample_json
from vlmpipe.trainer.data.sources.base import Source, records_from
from vlmpipe.trainer.storage.transfer import in_parallel

SUMMARY = "chunk.json"
ANSWERS = "answers.parquet"
ANSWERS_SCHEMA = pa.schema(
    [(name, pa.string()) for name in ("slice", "question", "answer")] + [("train", pa.int64()), ("eval", pa.int64())]
)

Report = Callable[[int, int], None]  # records read and rejected so far


class ChunkMaker:
    """Prepares chunks of a source in ascending order: each record is read once, and only parts that are needed."""

    def __init__(
        self,
        config: JobConfig,
        source: Source,
        plan: Path,
        chat: Chat,
        settings: str,
        threads: int,
    ) -> None:
        """`plan`: folder of the plan. `settings`: digest of all that decides a chunk's files beside its records."""
        self._config, self._settings, self._threads = config, settings, threads
        self._described = config.data.described()  # once: it names every source, of which each has chunks
        self._parts, self._part_starts = source.parts(), json.loads((plan / PARTS).read_text(encoding="utf-8"))
        self._validator, self._excluded = SampleValidator(config, chat), read_exclusions(config.data.exclude)
        self._store = ChunkStore(config.run.chunks_root)
        self._records: Iterator[Sample | Reject] = iter(())
        self._position = -1  # of the next record; nothing is open yet

    def make(self, chunk: Chunk, report: Report) -> None:
        """Prepare the chunk and store it under its fingerprint."""
        with scratch() as folder:
            content = build_chunk(
                self._entries(chunk),
                folder,
                self._config.data,
                self._validator,
                threads=self._threads,
                repeats=frozenset(chunk.repeats),
                report=report,
            )
            if content != chunk.content:
                raise SourceChangedError(self._described)
            self._store.put(chunk.fingerprint(self._settings), folder)
        trim_memory()

    def _entries(self, chunk: Chunk) -> Iterator[Entry | Reject]:
        records, position = records_from(self._parts, self._part_starts, chunk.start)
        if not position <= self._position <= chunk.start:
            self._records, self._position = records, position
        for _ in islice(self._records, chunk.start - self._position):
            pass
        self._position = chunk.start
        for entry in chunk.entries(self._records, self._described, self._excluded):
            self._position += 1
            yield entry


def build_chunk(
    entries: Iterable[Entry | Reject],
    folder: Path,
    config: DataConfig,
    validator: SampleValidator,
    *,
    threads: int,
    repeats: frozenset[str] = frozenset(),
    report: Report,
) -> str:
    """Write the records' shards, index, rejects and counts into `folder`. Returns the chunk's `content` as it was read.

    Args:
        repeats: contents (`sample_digest`) of earlier chunks, which `data.duplicates: drop` leaves out here.
        report: called after each record.
    """
    writers = {split: ShardWriter(folder, split, config.shard_samples) for split in SPLITS}
    index, answers, sheet, signatures = IndexLines(), AnswerCounts(), ContactSheet(), SignatureWriter()
    met, dropped, read = set(repeats), 0, hashlib.sha256()
    with (folder / REJECTS).open("w", encoding="utf-8") as lines:
        ledger = Ledger(config.max_reject_fraction, lines)
        results = in_parallel(
            Witness(validator),
            ledger.counting(entries),
            threads=threads,
            ahead=RECORDS_AHEAD,
            weigh=image_bytes,
            max_bytes=threads * config.max_image_bytes,
            is_short=is_short,
        )
        for position, (result, digest) in enumerate(results):
            read.update(digest)
            samples = [] if isinstance(result, Reject) else _distinct(result, config, met)
            if isinstance(result, Accepted):
                dropped += len(result.samples) - len(samples)
                if not samples:
                    message = "the same images with the same text came before"
                    result = Reject(result.where, result.id, RejectCode.SAMPLE_DUPLICATE, message)
            if isinstance(result, Reject):
                # The record's number in the chunk; `merge` knows its place in the source.
                ledger.reject(replace(result, where=str(position)))
            else:
                ledger.accept(result.repairs)
            for sample, content in samples:
                answers.add(sample.split, sample.turns)
                sheet.add(sample.id, sample.split, sample.turns, sample.images)
                for place, image in enumerate(sample.images):
                    signatures.add(sample.split, sample.id, place, image.sha256, image.signature)
                _store(sample, content, writers[sample.split], index)
            report(position + 1, ledger.rejected)
    for writer in writers.values():
        writer.close()
    index.write_lines(folder)
    sheet.write(folder)
    signatures.write(folder)
    rows = [dict(zip(ANSWERS_SCHEMA.names, row, strict=True)) for row in answers.rows()]
    pq.write_table(pa.Table.from_pylist(rows, ANSWERS_SCHEMA), folder / ANSWERS)
    summary = ledger.summary()
    counts = {name: summary[name] for name in ("read", "accepted", "rejected", "repaired", "repairs")}
    thumbnails = write_reject_images(ledger.examples, folder, config.max_image_pixels)
    shards = {split: writer.shards for split, writer in writers.items()}
    write_json(folder / SUMMARY, counts | {"dropped": dropped, "pictures": thumbnails, "shards": shards})
    return read.hexdigest()


def _distinct(record: Accepted, config: DataConfig, met: set[str]) -> list[tuple[Accepted, str]]:
    """The record's samples with their contents, without repeats where these are dropped. Adds them to `met`."""
    distinct = []
    for sample in record.samples:
        content = sample_digest(sample.turns, [image.sha256 for image in sample.images])
        if config.duplicates == "keep" or content not in met:
            distinct.append((sample, content))
        met.add(content)
    return distinct


def _store(sample: Accepted, content: str, writer: ShardWriter, index: IndexLines) -> None:
    """Write a sample. Where samples may share prefixes, a shard has an image once."""
    key, hashes = key_of(sample.id), [image.sha256 for image in sample.images]
    images = [(image.extension, image.data) for image in sample.images]
    members = writer.add(key, sample_json(sample.id, sample.turns), images, () if sample.prefix is None else hashes)
    index.add(
        id=sample.id,
        key=key,
        split=sample.split,
        shard=members.shard,
        json_offset=members.json_offset,
        json_bytes=members.json_bytes,
        image_offsets=members.image_offsets,
        image_bytes=members.image_bytes,
        image_sha256=hashes,
        image_widths=[image.width for image in sample.images],
        image_heights=[image.height for image in sample.images],
        image_token_counts=list(sample.image_token_counts),
        image_tokens=sum(sample.image_token_counts),
        tokens=len(sample.encoded.input_ids),
        label_tokens=sample.encoded.label_tokens,
        turns=len(sample.turns),
        slices=[turn.slice for turn in sample.turns],
        content=content,
        **_video_columns(sample),
        **_prefix_columns(sample),
    )


def _video_columns(sample: Accepted) -> dict[str, object]:
    """Return the index columns of a sample's videos; empty if no image is a video."""
    clips = [image.clip for image in sample.images]
    if not any(clips):
        return {}
    patches = [(clip.patches, clip.patch_s) if clip else (0, 0.0) for clip in clips]
    return dict(zip(VIDEO_COLUMNS, map(list, zip(*patches, strict=True)), strict=True))


def _prefix_columns(sample: Accepted) -> dict[str, object]:
    """Return the index columns of a sample's prefix; empty where none is to be shared."""
    prefix = sample.prefix
    if prefix is None:
        return {}
    of_pair = {PAIR_COLUMNS[0]: prefix.pair_tokens} if sample.encoded.rejected_from else {}
    return dict(zip(PREFIX_COLUMNS, (prefix.tokens, prefix.key), strict=True)) | of_pair


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
