"""Lines of the index while data is prepared: a Parquet file in each chunk, which `sorted_lines` merges."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from vlmpipe.trainer.data.sample import Split
from vlmpipe.trainer.data.sqlite_table import disk_table

LINES = "index.parquet"  # of a chunk; up to format 13 also of prepared data
SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("key", pa.string()),
        ("split", pa.string()),
        ("shard", pa.string()),
        ("json_offset", pa.int64()),
        ("json_bytes", pa.int64()),
        ("image_offsets", pa.list_(pa.int64())),
        ("image_bytes", pa.list_(pa.int64())),
        ("image_sha256", pa.list_(pa.string())),
        ("image_widths", pa.list_(pa.int32())),
        ("image_heights", pa.list_(pa.int32())),
        ("image_token_counts", pa.list_(pa.int32())),  # of each image
        ("image_tokens", pa.int32()),  # sum over the images
        ("tokens", pa.int32()),  # of the whole sample, image tokens included
        ("label_tokens", pa.int32()),
        ("turns", pa.int32()),
        ("slices", pa.list_(pa.string())),  # of each turn
        ("content", pa.string()),  # equal for samples with the same images and texts
    ]
)

# Of each image: patches in time, 0 of what is no video, and seconds from one to the next. Null for a sample without a
# video. Lines without any lack the columns, so that they are what they were before there were any.
VIDEO_COLUMNS = ("video_patches", "video_patch_s")
WITH_VIDEOS = pa.schema([*SCHEMA, (VIDEO_COLUMNS[0], pa.list_(pa.int32())), (VIDEO_COLUMNS[1], pa.list_(pa.float64()))])
# Tokens and key of the prefix that a sample may share (`data.share_prefix`): in all lines of prepared data, or in none.
PREFIX_COLUMNS = ("prefix_tokens", "prefix_key")
# Tokens that both conversations of a pair begin with: likewise, of pairs.
PAIR_COLUMNS = ("pair_prefix_tokens",)
WIDEST = pa.schema(
    [
        *WITH_VIDEOS,
        (PREFIX_COLUMNS[0], pa.int32()),
        (PREFIX_COLUMNS[1], pa.string()),
        (PAIR_COLUMNS[0], pa.int32()),
    ]
)
OPTIONAL = (VIDEO_COLUMNS, PREFIX_COLUMNS, PAIR_COLUMNS)  # which lines have together, or not at all

GROUP_LINES = 8192  # in memory at a time


class IndexLines:
    """Collects a chunk's lines and sorts them by split and id. They wait on disk, where SQLite sorts them."""

    def __init__(self) -> None:
        self._table = disk_table("CREATE TABLE lines (split TEXT, id TEXT, line TEXT)")
        self._optional: set[str] = set()  # columns that some line has

    def add(self, *, split: Split, **rest: object) -> None:
        """One sample: exactly the columns of SCHEMA, and those of OPTIONAL that it has."""
        line = {"split": split, **rest}
        optional = [columns for columns in OPTIONAL if columns[0] in line]
        assert line.keys() == {*SCHEMA.names, *(name for columns in optional for name in columns)}
        self._optional.update(name for columns in optional for name in columns)
        self._table.execute("INSERT INTO lines VALUES (?, ?, ?)", (split, rest["id"], json.dumps(line)))

    def write_lines(self, folder: Path) -> None:
        """Write a chunk's Parquet file."""
        schema = schema_with(self._optional)
        with pq.ParquetWriter(folder / LINES, schema) as file:
            for group in self._sorted(schema):
                file.write_table(group)

    def _sorted(self, schema: pa.Schema) -> Iterator[pa.Table]:
        lines = self._table.execute("SELECT line FROM lines ORDER BY split, id")
        while group := lines.fetchmany(GROUP_LINES):
            yield pa.Table.from_pylist([json.loads(line) for (line,) in group], schema)


def schema_with(optional: Collection[str]) -> pa.Schema:
    """The columns of lines of which some have these optional ones."""
    return pa.schema([field for field in WIDEST if field.name in SCHEMA.names or field.name in optional])
