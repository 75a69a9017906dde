"""Converts prepared data of the format before: writes a new index and leaves all other files unchanged."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from vlmpipe.trainer.data.prepare.scratch import scratch
from vlmpipe.trainer.data.sample import SPLITS, Split
from vlmpipe.trainer.data.shards.index_file import NAME, IndexFileWriter
from vlmpipe.trainer.data.shards.index_lines import GROUP_LINES, LINES, SCHEMA, WITH_VIDEOS
from vlmpipe.trainer.data.shards.prepared_files import CONVERTIBLE, DONE, FORMAT, Manifest, OtherFormatError
from vlmpipe.trainer.errors import DataError
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.base import Storage
from vlmpipe.trainer.storage.file_sums import FileSum


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
            samples = _write_index(_old_index(storage, manifest), folder)
            index = FileSum.of(folder / NAME)
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


def _write_index(old: Path, folder: Path) -> int:
    """Write the index from a Parquet file, whose lines are in order. Returns the number of samples."""
    with pq.ParquetFile(old, pre_buffer=False) as file:
        if file.schema_arrow not in (SCHEMA, WITH_VIDEOS):
            raise _damaged(str(old), f"it has the columns {file.schema_arrow.names}", f"its {DONE}")
        with IndexFileWriter(folder, _shards(file), with_videos=file.schema_arrow == WITH_VIDEOS) as index:
            for lines in file.iter_batches(GROUP_LINES):
                index.add(pa.Table.from_batches([lines]))
        return int(file.metadata.num_rows)


def _shards(file: pq.ParquetFile) -> dict[Split, list[str]]:
    shards: dict[Split, set[str]] = {split: set() for split in SPLITS}
    for lines in file.iter_batches(columns=["split", "shard"]):
        pairs = pa.Table.from_batches([lines]).group_by(["split", "shard"]).aggregate([])
        for pair in pairs.to_pylist():
            shards[pair["split"]].add(pair["shard"])
    return {split: sorted(names) for split, names in shards.items()}
