"""The index of prepared data: one line per sample, with its lengths and the location of its bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from vlmpipe.trainer.data.packing import Int64Array
from vlmpipe.trainer.data.sample import SPLITS, Split
from vlmpipe.trainer.data.shards.image_index import HASHES, UniqueImages
from vlmpipe.trainer.data.shards.prepared_files import open_prepared
from vlmpipe.trainer.data.shards.tar import Members
from vlmpipe.trainer.data.sqlite_table import disk_table
from vlmpipe.trainer.errors import DataError
from vlmpipe.trainer.sizing.image_grids import VideoSize
from vlmpipe.trainer.storage.base import Storage

NAME = "index.parquet"
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
# video. An index without any lacks the columns, so that it is what it was before there were any.
VIDEO_COLUMNS = ("video_patches", "video_patch_s")
WITH_VIDEOS = pa.schema([*SCHEMA, (VIDEO_COLUMNS[0], pa.list_(pa.int32())), (VIDEO_COLUMNS[1], pa.list_(pa.float64()))])

ROW_GROUP_LINES = 8192


class IndexWriter:
    """Collects lines and writes them sorted by split and id. They wait on disk, where SQLite sorts them."""

    def __init__(self) -> None:
        self._table = disk_table("CREATE TABLE lines (split TEXT, id TEXT, line TEXT)")
        self._schema = SCHEMA

    def add(self, **line: object) -> None:
        """One sample; exactly the columns of SCHEMA, of one with videos those of WITH_VIDEOS."""
        if line.get(VIDEO_COLUMNS[0]):
            self._schema = WITH_VIDEOS
        assert line.keys() == set(SCHEMA.names) or line.keys() == set(WITH_VIDEOS.names)
        self._table.execute("INSERT INTO lines VALUES (?, ?, ?)", (line["split"], line["id"], json.dumps(line)))

    def add_table(self, lines: pa.Table) -> None:
        """Many samples."""
        for batch in lines.to_batches(ROW_GROUP_LINES):
            for line in batch.to_pylist():
                if not line.get(VIDEO_COLUMNS[0]):
                    line = {name: line[name] for name in SCHEMA.names}
                self.add(**line)

    def write(self, folder: Path) -> None:
        """Write the index."""
        lines = self._table.execute("SELECT line FROM lines ORDER BY split, id")
        with pq.ParquetWriter(folder / NAME, self._schema) as index:
            while group := lines.fetchmany(ROW_GROUP_LINES):
                index.write_table(pa.Table.from_pylist([json.loads(line) for (line,) in group], self._schema))


class SplitIndex:
    """The samples of one split, ordered by id. Sample numbers are positions in it."""

    def __init__(self, name: Split, table: pa.Table) -> None:
        self.name = name
        self._columns = {column: table.column(column).combine_chunks() for column in table.schema.names}
        self.ids: list[str] = self._columns["id"].to_pylist()
        self.tokens = self._numpy("tokens")  # (samples,)
        self.label_tokens = self._numpy("label_tokens")  # (samples,)
        self.image_tokens = self._numpy("image_tokens")  # (samples,) of all images of a sample
        self.turns = self._numpy("turns")  # (samples,)
        self.shards, self.shard_numbers = _numbered(self._columns["shard"])  # names in order; (samples,) places in them
        self.image_count = pc.list_value_length(self._columns["image_sha256"]).to_numpy().astype(np.int64)  # (samples,)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def has_videos(self) -> bool:
        """Return whether the data set has any that the model takes as such."""
        return VIDEO_COLUMNS[0] in self._columns

    def sample_location(self, number: int) -> Members:
        """Location of the sample's bytes."""
        are_videos = [isinstance(size, VideoSize) for size in self.image_sizes(number)] if self.has_videos else []
        return Members(
            shard=self._value("shard", number),
            json_offset=self._value("json_offset", number),
            json_bytes=self._value("json_bytes", number),
            image_offsets=self._value("image_offsets", number),
            image_bytes=self._value("image_bytes", number),
            are_videos=are_videos,
        )

    def key(self, number: int) -> str:
        """The sample's name in its shard."""
        return str(self._value("key", number))

    def stored_order(self) -> Int64Array:
        """(samples,) sample numbers in the order of their bytes."""
        return np.lexsort((self._numpy("json_offset"), self.shard_numbers)).astype(np.int64)

    def tiles(self, tile_tokens: int) -> NDArray[np.int64]:
        """(samples,) tiles of each sample's images, of `tile_tokens` tokens each; 0: images are not cut.

        Each patch in time of a video counts as an image.
        """
        if tile_tokens:
            return self.image_tokens // tile_tokens
        if not self.has_videos:
            return self.image_count
        patches = self._columns[VIDEO_COLUMNS[0]]
        more = np.maximum(pc.list_flatten(patches).to_numpy() - 1, 0)
        owners = pc.list_parent_indices(patches).to_numpy()
        return self.image_count + np.bincount(owners, more, len(self)).astype(np.int64)

    def tokens_with(self, max_kept: int) -> Int64Array:
        """(samples,) tokens of each sample with at most `max_kept` tokens of each image."""
        counts = pc.list_flatten(self._columns["image_token_counts"]).to_numpy().astype(np.int64)
        owners = np.repeat(np.arange(len(self)), self.image_count)
        left_out = np.bincount(owners, np.maximum(counts - max_kept, 0), len(self)).astype(np.int64)
        return self.tokens - left_out

    def image_sha256(self, number: int) -> list[str]:
        """Content hash of each of the sample's images, in order of their marks."""
        return list(self._value("image_sha256", number))

    def image_token_counts(self, number: int) -> list[int]:
        """Tokens of each of the sample's images."""
        return list(self._value("image_token_counts", number))

    def image_sizes(self, number: int) -> list[tuple[int, int]]:
        """(width, height) in pixels of each of the sample's images; of videos a VideoSize."""
        sizes = list(zip(self._value("image_widths", number), self._value("image_heights", number), strict=True))
        if not self.has_videos or self._value(VIDEO_COLUMNS[0], number) is None:
            return sizes
        lengths = zip(*(self._value(name, number) for name in VIDEO_COLUMNS), strict=True)
        return [
            VideoSize(*size, patches, patch_s) if patches else size
            for size, (patches, patch_s) in zip(sizes, lengths, strict=True)
        ]

    def slices(self, number: int) -> list[str]:
        """Slice of each of the sample's turns."""
        return list(self._value("slices", number))

    def images(self) -> NDArray[np.bytes_]:
        """(images,) content hashes of all samples' images, `image_count` of each sample."""
        return np.array(pc.list_flatten(self._columns["image_sha256"]).to_pylist(), HASHES)

    def image_places(self) -> Int64Array:
        """(images, 4) number of the shard, offset, bytes, and whether it is a video, of each of `images`."""
        spans = [pc.list_flatten(self._columns[name]).to_numpy() for name in ("image_offsets", "image_bytes")]
        shards = np.repeat(self.shard_numbers, self.image_count)
        return np.stack([shards, *spans, self._are_videos()], axis=1).astype(np.int64)

    def _are_videos(self) -> NDArray[np.bool_]:
        """(images,) of all samples. The column is null for a sample without a video."""
        found = np.zeros(int(self.image_count.sum()), np.bool_)
        if self.has_videos:
            patches = self._columns[VIDEO_COLUMNS[0]]
            owners = pc.list_parent_indices(patches).to_numpy()
            firsts = np.cumsum(self.image_count) - self.image_count
            within = np.arange(len(owners)) - np.searchsorted(owners, owners)
            found[firsts[owners] + within] = pc.list_flatten(patches).to_numpy() > 0
        return found

    def _value(self, column: str, number: int) -> Any:
        return self._columns[column][number].as_py()

    def _numpy(self, column: str) -> NDArray[np.int64]:
        return np.asarray(self._columns[column].to_numpy(), np.int64)


def _numbered(names: pa.Array) -> tuple[list[str], NDArray[np.int64]]:
    """The sorted distinct names, and each name's position among them."""
    encoded = names.dictionary_encode()
    distinct, place = np.unique(np.array(encoded.dictionary.to_pylist(), np.str_), return_inverse=True)
    return distinct.tolist(), place[encoded.indices.to_numpy().astype(np.int64)]


class Index:
    """All splits of one prepared data set."""

    def __init__(self, uri: str, table: pa.Table) -> None:
        self.uri = uri
        self._splits = {name: SplitIndex(name, table.filter(pc.equal(table.column("split"), name))) for name in SPLITS}

    @classmethod
    def load(cls, prepared_uri: str, storage: Storage | None = None) -> Index:
        """Read the index at `prepared_uri`. Raises DataError when it is damaged or of another version."""
        path = (storage or open_prepared(prepared_uri)).fetch(NAME)
        try:
            table = pq.read_table(path)
        except pa.ArrowInvalid as error:
            raise _unusable(path, str(error)) from error
        if table.schema not in (SCHEMA, WITH_VIDEOS):
            raise _unusable(path, f"columns {table.schema.names}")
        return cls(prepared_uri, table)

    def split(self, name: Split) -> SplitIndex:
        return self._splits[name]

    def unique_images(self) -> UniqueImages:
        """A location of every distinct image of all splits."""
        splits, places = list(self._splits.values()), []
        shards: list[str] = []
        for split in splits:
            places.append(split.image_places() + np.array([len(shards), 0, 0, 0]))
            shards += split.shards
        return UniqueImages(np.concatenate([split.images() for split in splits]), shards, np.concatenate(places))


def _unusable(path: Path, found: str) -> DataError:
    return DataError(
        f"{path} is not an index of this version of the trainer: {found}",
        expected="the columns " + ", ".join(SCHEMA.names),
        fix="delete the DONE file beside it and run again: the data is then prepared again",
    )
