"""A plan and its prepared chunks as `plan-data` and `prepare-chunks` leave them, made without preparing a record.

Shards have a few bytes instead of samples: what merges chunks copies them and reads their sums.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.data.accounting.coverage import COVERAGE
from vlmpipe.trainer.data.chat.run_chat import make_chat
from vlmpipe.trainer.data.near_duplicates import table as signatures
from vlmpipe.trainer.data.prepare.chunks import chunk as files
from vlmpipe.trainer.data.prepare.chunks.merge import Part
from vlmpipe.trainer.data.prepare.chunks.plan import CHUNKS, PARTS, WHERE, WHERE_SCHEMA, Chunk
from vlmpipe.trainer.data.prepare.chunks.prepare import ChunkedPreparation, store_plan
from vlmpipe.trainer.data.prepare.chunks.store import ChunkStore
from vlmpipe.trainer.data.prepare.fingerprint import SAMPLES_VERSION, fingerprint
from vlmpipe.trainer.data.prepare.previews import ContactSheet
from vlmpipe.trainer.data.rejects import REJECTS
from vlmpipe.trainer.data.sample import DEFAULT_SLICE, SPLITS
from vlmpipe.trainer.data.shards.index_file import CONTENT_BYTES
from vlmpipe.trainer.data.shards.index_lines import LINES, SCHEMA
from vlmpipe.trainer.data.shards.tar import Sidecar, shard_name, write_sidecar
from vlmpipe.trainer.data.shards.verified_files import FOLDER
from vlmpipe.trainer.data.sources import open_source
from vlmpipe.trainer.data.tokenize import FOLDER as TOKENIZER
from vlmpipe.trainer.storage.base import crc32c_of

HELD_OUT = 0.05  # of the samples
MEMBER_BYTES = 512  # of a text, after a header of 512
WORDS = ("red", "green", "blue", "small", "large", "round", "square", "old", "new", "bright")


def question(record: int) -> str:
    return f"what is number {record}?"


def answer(record: int) -> str:
    return " ".join(WORDS[int(digit)] for digit in str(record))


def make_chunks(job: JobConfig, records: int) -> None:
    """Store the plan of the job's source, which has `records` texts `r0`, `r1`, ..., and each of its chunks."""
    with tempfile.TemporaryDirectory() as scratch:
        plan = Path(scratch, "plan")
        plan.mkdir()
        _write_plan(plan, job, records)
        store_plan(job, fingerprint(job), plan)
        planned = ChunkedPreparation(job, open_source(job.data), plan, SAMPLES_VERSION)
        store = ChunkStore(job.run.chunks_root)
        for chunk, part in zip(planned.chunks, planned.parts(planned.chunks), strict=True):
            if not store.holds(part.name):
                folder = Path(scratch, part.name)
                _write_chunk(folder, chunk, part, job.data.shard_samples)
                store.put(part.name, folder)


def _write_plan(folder: Path, job: JobConfig, records: int) -> None:
    texts = itertools.chain.from_iterable((question(record), answer(record)) for record in range(1000))
    make_chat(job.model, job.data, texts).save(folder / TOKENIZER)
    random = np.random.default_rng(0)
    with (
        (folder / CHUNKS).open("w", encoding="utf-8") as chunks,
        pq.ParquetWriter(folder / WHERE, WHERE_SCHEMA) as places,
    ):
        for number, start in enumerate(range(0, records, job.data.chunk_samples)):
            size = min(job.data.chunk_samples, records - start)
            validation = np.flatnonzero(random.random(size) < HELD_OUT).tolist()
            content = hashlib.sha256(str(number).encode()).hexdigest()
            chunks.write(Chunk(number, start, size, content, held_out=tuple(validation)).to_json() + "\n")
            where = [f"row {record}" for record in range(start, start + size)]
            places.write_table(pa.table({"where": where}, WHERE_SCHEMA), row_group_size=size)
    (folder / PARTS).write_text("[0]", encoding="utf-8")
    coverage = {"sources": {"": {"unread": {}, "samples": records}}, "notes": []}
    (folder / COVERAGE).write_text(json.dumps(coverage), encoding="utf-8")


def _write_chunk(folder: Path, chunk: Chunk, part: Part, shard_samples: int) -> None:
    (folder / FOLDER).mkdir(parents=True)
    splits = np.array(list(chunk.splits()))
    shards = _write_shards(folder, splits, part.name, shard_samples)
    pq.write_table(_lines(chunk, splits, shard_samples), folder / LINES)
    pq.write_table(_answers(chunk, splits), folder / files.ANSWERS)
    pq.write_table(signatures.SCHEMA.empty_table(), folder / signatures.NAME)
    (folder / REJECTS).touch()
    ContactSheet().write(folder)
    counts = {"read": chunk.records, "accepted": chunk.records, "rejected": 0, "repaired": 0, "repairs": {}}
    files.write_json(folder / files.SUMMARY, counts | {"dropped": 0, "pictures": {}, "shards": shards})


def _write_shards(folder: Path, splits: np.ndarray, chunk: str, shard_samples: int) -> dict[str, int]:
    """Write the shards with their sidecars. Returns their number by split."""
    shards: dict[str, int] = {split: -(-int((splits == split).sum()) // shard_samples) for split in SPLITS}
    for split, count in shards.items():
        for number in range(count):
            name = shard_name(split, number)
            content = f"{name} of {chunk}".encode()
            (folder / name).write_bytes(content)
            write_sidecar(folder, Sidecar(name, shard_samples, len(content), crc32c_of(content)))
    return shards


def _lines(chunk: Chunk, splits: np.ndarray, shard_samples: int) -> pa.Table:
    """The chunk's lines of the index, sorted."""
    numbers = np.arange(chunk.start, chunk.start + chunk.records)
    ids = [f"r{number}" for number in numbers.tolist()]
    place = np.zeros(chunk.records, np.int64)  # in the split
    for split in SPLITS:
        place[splits == split] = np.arange((splits == split).sum())
    contents = np.random.default_rng(chunk.number).bytes(CONTENT_BYTES * chunk.records).hex()
    digits = 2 * CONTENT_BYTES
    none = pa.array([[]] * chunk.records)
    columns = {name: none for name in SCHEMA.names if name.startswith("image_") and name != "image_tokens"}
    columns |= {
        "id": ids,
        "key": ids,
        "split": splits,
        "shard": [shard_name(*pair) for pair in zip(splits, (place // shard_samples).tolist(), strict=True)],
        "json_offset": MEMBER_BYTES + 2 * MEMBER_BYTES * (place % shard_samples),
        "json_bytes": 80 + numbers % 40,
        "image_tokens": np.zeros(chunk.records, np.int64),
        "tokens": 20 + numbers % 30,
        "label_tokens": 2 + numbers % 10,
        "turns": np.ones(chunk.records, np.int64),
        "slices": [[DEFAULT_SLICE]] * chunk.records,
        "content": [contents[start : start + digits] for start in range(0, len(contents), digits)],
    }
    lines = pa.table({field.name: pa.array(columns[field.name]).cast(field.type) for field in SCHEMA}, SCHEMA)
    return lines.take(pc.sort_indices(lines, sort_keys=[("split", "ascending"), ("id", "ascending")]))


def _answers(chunk: Chunk, splits: np.ndarray) -> pa.Table:
    """How often each answer is given, sorted: once."""
    records = range(chunk.start, chunk.start + chunk.records)
    columns = {
        "slice": [DEFAULT_SLICE] * chunk.records,
        "question": [question(record) for record in records],
        "answer": [answer(record) for record in records],
        "train": (splits == "train").astype(np.int64),
        "eval": (splits == "eval").astype(np.int64),
    }
    return pa.table(columns, files.ANSWERS_SCHEMA).sort_by("question")
