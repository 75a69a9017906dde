"""The index's columns of videos: there where a data set has videos, and only there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from vlmpipe.trainer.data.shards.index import NAME, SCHEMA, VIDEO_COLUMNS, WITH_VIDEOS, IndexWriter, SplitIndex
from vlmpipe.trainer.sizing.image_grids import VideoSize


def line(identity: str, images: int, **videos: Any) -> dict[str, Any]:
    values = {name: 0 if "int" in str(SCHEMA.field(name).type) else "" for name in SCHEMA.names}
    lists = {name: [] for name in SCHEMA.names if "list" in str(SCHEMA.field(name).type)}
    sizes = {"image_widths": [8] * images, "image_heights": [6] * images, "image_sha256": ["0"] * images}
    return values | lists | sizes | {"id": identity, "split": "train", "image_tokens": 0} | videos


def written(folder: Path, *lines: dict[str, Any]) -> SplitIndex:
    """By way of a chunk for each line, as several sources have."""
    whole = IndexWriter()
    for number, one in enumerate(lines):
        (folder / str(number)).mkdir()
        chunk = IndexWriter()
        chunk.add(**one)
        chunk.write(folder / str(number))
        whole.add_table(pq.read_table(folder / str(number) / NAME))
    whole.write(folder)
    return SplitIndex("train", pq.read_table(folder / NAME))


def test_videos_have_their_length_and_count_by_patches(tmp_path: Path) -> None:
    videos = dict(zip(VIDEO_COLUMNS, ([0, 3, 1], [0.0, 0.7, 2.0]), strict=True))
    split = written(tmp_path, line("a", 2), line("b", 3, **videos), line("c", 0))
    assert split.has_videos and pq.read_schema(tmp_path / NAME) == WITH_VIDEOS
    assert split.tiles(0).tolist() == [2, 5, 0]
    still, *moving = split.image_sizes(1)
    assert not isinstance(still, VideoSize) and split.image_sizes(0) == [(8, 6), (8, 6)]
    assert [(*one, one.patches, one.patch_s) for one in moving if isinstance(one, VideoSize)] == [
        (8, 6, 3, 0.7),
        (8, 6, 1, 2.0),
    ]


def test_an_index_without_videos_is_what_it_was(tmp_path: Path) -> None:
    split = written(tmp_path, line("a", 2), line("b", 1))
    assert not split.has_videos and pq.read_schema(tmp_path / NAME) == SCHEMA
    assert split.tiles(0).tolist() == [2, 1]
