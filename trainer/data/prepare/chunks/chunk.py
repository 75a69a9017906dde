"""A chunk: a run of neighbouring records, prepared by itself into shards, an index and counts of its own.

Nothing in a chunk's files depends on where in the source it lies, so a chunk that was prepared once serves wherever the
same records come again. What only the whole can tell is left to `trainer.data.prepare.chunks.merge`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from trainer.config.data import DataConfig
from trainer.data.prepare.deduplicate import AnswerCounts
from trainer.data.prepare.preview import ContactSheet
from trainer.data.prepare.statistics import sample_digest
from trainer.data.prepare.thread_map import map_in_order
from trainer.data.prepare.thumbnails import write_reject_pictures
from trainer.data.prepare.validate_sample import Accepted, Entry, SampleValidator, image_bytes
from trainer.data.rejects import REJECTS, Ledger, Reject, RejectCode
from trainer.data.sample import SPLITS
from trainer.data.shards.index import IndexWriter
from trainer.data.shards.tar import ShardWriter, key_of, sample_json

SUMMARY = "chunk.json"
ANSWERS = "answers.parquet"
ANSWERS_SCHEMA = pa.schema(
    [("slice", pa.string()), ("answer", pa.string()), ("train", pa.int64()), ("eval", pa.int64())]
)

Report = Callable[[int, int], None]  # records read and rejected so far


def build_chunk(
    entries: Iterable[Entry | Reject],
    folder: Path,
    config: DataConfig,
    examine: SampleValidator,
    *,
    threads: int,
    repeats: frozenset[str] = frozenset(),
    report: Report,
) -> None:
    """Write the records' shards, index, rejects and counts into `folder`.

    Args:
        repeats: contents (`sample_digest`) that came in a chunk before, which data.duplicates drop leaves out here.
        report: called after each record.
    """
    writers = {split: ShardWriter(folder, split, config.shard_samples) for split in SPLITS}
    index, answers, sheet = IndexWriter(), AnswerCounts(), ContactSheet()
    met, dropped = set(repeats), 0
    with (folder / REJECTS).open("w") as lines:
        ledger = Ledger(config.max_reject_fraction, lines)
        results = map_in_order(
            examine, ledger.counting(entries), threads, weigh=image_bytes, max_bytes=threads * config.max_image_bytes
        )
        for position, result in enumerate(results):
            if isinstance(result, Accepted):
                content = sample_digest(result.turns, [image.sha256 for image in result.images])
                if config.duplicates == "drop" and content in met:
                    dropped += 1
                    message = "the same images with the same text came before"
                    result = Reject(result.where, result.id, RejectCode.SAMPLE_DUPLICATE, message)
            if isinstance(result, Reject):
                # Where the record lies is known to whoever puts chunks together: here it is the how-manieth.
                ledger.reject(replace(result, where=str(position)))
            else:
                met.add(content)
                ledger.accept(result.repairs)
                answers.add(result.split, result.turns)
                sheet.add(result.id, result.split, result.turns, result.images)
                _store(result, content, writers[result.split], index)
            report(position + 1, ledger.rejected)
    for writer in writers.values():
        writer.close()
    index.write(folder)
    sheet.write(folder)
    rows = [dict(zip(ANSWERS_SCHEMA.names, row, strict=True)) for row in answers.rows()]
    pq.write_table(pa.Table.from_pylist(rows, ANSWERS_SCHEMA), folder / ANSWERS)
    summary = ledger.summary()
    kept = {name: summary[name] for name in ("read", "accepted", "rejected", "repaired", "repairs")}
    pictures = write_reject_pictures(ledger.examples, folder, config.max_image_pixels)
    shards = {split: writer.shards for split, writer in writers.items()}
    write_json(folder / SUMMARY, kept | {"dropped": dropped, "pictures": pictures, "shards": shards})


def _store(sample: Accepted, content: str, writer: ShardWriter, index: IndexWriter) -> None:
    key = key_of(sample.id)
    members = writer.add(
        key, sample_json(sample.id, sample.turns), [(image.extension, image.data) for image in sample.images]
    )
    index.add(
        id=sample.id,
        key=key,
        split=sample.split,
        shard=members.shard,
        json_offset=members.json_offset,
        json_bytes=members.json_bytes,
        image_offsets=members.image_offsets,
        image_bytes=members.image_bytes,
        image_sha256=[image.sha256 for image in sample.images],
        image_widths=[image.width for image in sample.images],
        image_heights=[image.height for image in sample.images],
        image_token_counts=list(sample.image_token_counts),
        image_tokens=sum(sample.image_token_counts),
        tokens=len(sample.encoded.input_ids),
        label_tokens=sample.encoded.label_tokens,
        turns=len(sample.turns),
        slices=[turn.slice for turn in sample.turns],
        content=content,
    )


def write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
