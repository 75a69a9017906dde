"""Indexes of prepared data: rows of one, and one whose samples have no bytes, for what reads ids and images only."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from tests.support.data.prepared import seal
from vlmpipe.trainer.data.sample import SPLITS, Split
from vlmpipe.trainer.data.shards.index_file import NAME, read_columns, schema_of
from vlmpipe.trainer.data.shards.index_lines import LINES, IndexLines
from vlmpipe.trainer.data.shards.sorted_lines import SortedLines


def index_rows(uri: str | Path) -> list[dict[str, Any]]:
    """The rows of a folder's index, in order; without columns of videos."""
    names = schema_of(with_videos=False).names
    return [row for _, rows in read_columns(Path(uri, NAME), names) for row in rows.to_pylist()]


def lines_of(samples: Mapping[str, Sequence[str]], split: Split) -> Iterator[dict[str, Any]]:
    """Lines of samples without bytes. samples: names of the images of each, whose hashes are the lines', by its id."""
    for identity, images in samples.items():
        ones = [1] * len(images)
        yield {
            "id": identity,
            "key": identity,
            "split": split,
            "shard": "shard",
            "json_offset": 0,
            "json_bytes": 1,
            "image_offsets": ones,
            "image_bytes": ones,
            "image_sha256": [hashlib.sha256(image.encode()).hexdigest() for image in images],
            "image_widths": ones,
            "image_heights": ones,
            "image_token_counts": ones,
            "image_tokens": len(images),
            "tokens": 2,
            "label_tokens": 1,
            "turns": 1,
            "slices": ["all"],
            "content": hashlib.sha256(identity.encode()).hexdigest()[:32],
        }


def sort_lines(folder: Path, chunks: Sequence[Path]) -> None:
    """Write the index of chunks, whose shards keep their names, into a folder."""
    lines, shards = SortedLines(), set()
    for chunk in chunks:
        read = partial(pq.read_table, chunk / LINES)
        shards |= {(row["split"], row["shard"]) for row in read(columns=["split", "shard"]).to_pylist()}
        lines.add(read(), read)
    lines.write_index(folder, {split: sorted(name for of, name in shards if of == split) for split in SPLITS})


def write_collected(folder: Path, lines: IndexLines) -> None:
    """Write the index of a single chunk's lines."""
    with tempfile.TemporaryDirectory() as chunk:
        lines.write_lines(Path(chunk))
        sort_lines(folder, [Path(chunk)])


def write_index(folder: Path, samples: Mapping[str, Sequence[str]], split: Split = "eval") -> Path:
    """Write prepared data of one split: `lines_of` these samples."""
    folder.mkdir()
    index = IndexLines()
    for line in lines_of(samples, split):
        index.add(**line)
    write_collected(folder, index)
    seal(folder)
    return folder
