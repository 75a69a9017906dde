"""Converts prepared data of the format before: writes a new index and leaves all other files unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from vlmpipe.trainer.data.prepare.scratch import scratch
from vlmpipe.trainer.data.sample import SPLITS, Split
from vlmpipe.trainer.data.shards.index_file import NAME, IndexFileWriter
from vlmpipe.trainer.data.shards.index_lines import LINES, SCHEMA, WITH_VIDEOS
from vlmpipe.trainer.data.shards.prepared_files import CONVERTIBLE, DONE, FORMAT, Manifest, OtherFormatError
from vlmpipe.trainer.errors import DataError
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.base import Storage
from vlmpipe.trainer.storage.file_sums import FileSum
from vlmpipe.trainer.threads import thread_pool

READ_LINES = 1 << 16  # at a time


@dataclass(frozen=True)
class Converted:
    """Prepared data that is of today's format now. samples: 0 where it was before."""

    uri: str
    samples: int
    index_bytes: int


def convert(uri: str) -> Converted:
    """Make prepared data of format 13 data of format 14, in place: its address stays, and so all that refers to it.

    Stopped anywhere, it leaves data of either format, and the next call does the rest: the new index is added beside
    the old one, DONE is replaced in one step, and then the old index is deleted. Raises DataError for data that is
    damaged, OtherFormatError for other formats, UserError where there is none.
    """
    storage = open_storage(uri)
    try:
        manifest = Manifest.read(storage)
    except OtherFormatError:
        manifest = Manifest.read(storage, file_format=CONVERTIBLE)
    samples = 0
    if manifest.format == CONVERTIBLE:
        with scratch() as folder:
            samples, index = _write_index(_old_index(storage, manifest), folder)
            storage.upload(folder / NAME, NAME, crc32c=index.crc32c)
        files = {name: sums for name, sums in manifest.files.items() if name != LINES} | {NAME: index}
        manifest = replace(manifest, format=FORMAT, files=files).in_pages(storage)
        storage.write(DONE, manifest.to_bytes())
    if storage.stat(LINES) is not None:
        storage.delete(LINES)
    return Converted(uri, samples, manifest.files[NAME].bytes)


def _old_index(storage: Storage, manifest: Manifest) -> Path:
    how = "it is missing"
    if storage.stat(LINES) is not None:
        path = storage.fetch(LINES)
        if FileSum.of(path) == manifest.files.get(LINES):
            return path
        how = f"its size or checksum (CRC32C) differs from that in {DONE}"
    raise _damaged(storage.uri(LINES), how, storage.uri(DONE))


def _damaged(name: str, how: str, done: str) -> DataError:
    """Preparation would refuse the data for its format, and not prepare it again as other damaged data."""
    return DataError(
        f"{name} is damaged: {how}",
        expected="the index that was prepared",
        fix=f"wait for another conversion of it, if one is running; else delete {done}, and the next run prepares the "
        "data again",
    )


def _write_index(old: Path, folder: Path) -> tuple[int, FileSum]:
    """Write the index from a Parquet file, whose lines are in order. Returns the number of samples, and its sum."""
    schema = pq.read_schema(old)
    if schema not in (SCHEMA, WITH_VIDEOS):
        raise _damaged(str(old), f"it has the columns {schema.names}", f"its {DONE}")
    with pq.ParquetFile(old, pre_buffer=False, read_dictionary=["shard"]) as file:
        with IndexFileWriter(folder, _shards(file), optional=set(schema.names) - set(SCHEMA.names)) as index:
            for lines in _one_ahead(file.iter_batches(READ_LINES, use_threads=False)):
                index.add(pa.Table.from_batches([lines]))
        return int(file.metadata.num_rows), index.file_sum


def _one_ahead(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Batches, each decoded in a thread while the one before is written."""
    with thread_pool(1, name="lines") as pool:
        decoding = pool.submit(next, batches, None)
        while (lines := decoding.result()) is not None:
            decoding = pool.submit(next, batches, None)
            yield lines


def _shards(file: pq.ParquetFile) -> dict[Split, list[str]]:
    shards: dict[Split, set[str]] = {split: set() for split in SPLITS}
    for lines in file.iter_batches(READ_LINES, columns=["split", "shard"]):
        for split in SPLITS:
            of_split = lines.column("shard").filter(pc.equal(lines.column("split"), split))
            shards[split].update(of_split.unique().to_pylist())
    return {split: sorted(names) for split, names in shards.items()}
