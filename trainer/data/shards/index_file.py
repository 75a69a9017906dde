"""The file of the index: an uncompressed Arrow file with one batch a split, which all processes of a machine map.

A column of a split is one array, so that numbers are read where they lie, and rows by their place.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from vlmpipe.trainer.data.prefixes.groups import KEY_BYTES
from vlmpipe.trainer.data.sample import SPLITS, Split
from vlmpipe.trainer.data.shards.growing_arrays import GrowingArray
from vlmpipe.trainer.data.shards.index_lines import OPTIONAL, PREFIX_COLUMNS
from vlmpipe.trainer.errors import DataError
from vlmpipe.trainer.storage.base import TEMPORARY_PREFIX
from vlmpipe.trainer.storage.file_sums import FileSum, SummedFile

NAME = "index.arrow"
SHA256_BYTES, CONTENT_BYTES = 32, 16
IMAGE_FIELDS = {  # by field: the column of the lines, and its type
    "sha256": ("image_sha256", pa.binary(SHA256_BYTES)),
    "offset": ("image_offsets", pa.int64()),
    "bytes": ("image_bytes", pa.int64()),
    "width": ("image_widths", pa.int32()),
    "height": ("image_heights", pa.int32()),
    "tokens": ("image_token_counts", pa.int32()),
}
VIDEO_FIELDS = {  # 0 of what is no video; data without any lacks both
    "video_patches": ("video_patches", pa.int32()),
    "video_patch_s": ("video_patch_s", pa.float64()),
}
PREFIX_FIELDS = (("prefix_tokens", pa.int32()), ("prefix_key", pa.binary(KEY_BYTES)))
PAIR_FIELDS = (("pair_prefix_tokens", pa.int32()),)
ROWS_READ = 1 << 16  # at a time, by `read_columns`


def schema_of(*, with_videos: bool, with_prefixes: bool = False, with_pairs: bool = False) -> pa.Schema:
    """The columns of an index. with_prefixes: of data that was prepared with `data.share_prefix`. with_pairs: of pairs
    of this data."""
    fields = IMAGE_FIELDS | (VIDEO_FIELDS if with_videos else {})
    return pa.schema(
        [
            ("id", pa.large_string()),
            ("key", pa.large_string()),
            ("split", pa.dictionary(pa.int8(), pa.string())),
            ("shard", pa.dictionary(pa.int32(), pa.string())),  # names of the training split's shards come first
            ("json_offset", pa.int64()),
            ("json_bytes", pa.int32()),
            ("images", pa.large_list(pa.struct([(name, kind) for name, (_, kind) in fields.items()]))),
            ("image_tokens", pa.int32()),  # sum over the images
            ("tokens", pa.int32()),  # of the whole sample, image tokens included
            ("label_tokens", pa.int32()),
            ("turns", pa.int32()),
            ("slices", pa.large_list(pa.large_string())),  # of each turn
            ("content", pa.binary(CONTENT_BYTES)),  # equal for samples with the same images and texts
            *(PREFIX_FIELDS if with_prefixes else ()),
            *(PAIR_FIELDS if with_pairs else ()),
        ]
    )


KNOWN = [
    schema_of(with_videos=videos, with_prefixes=prefixes, with_pairs=pairs)
    for videos in (False, True)
    for prefixes, pairs in ((False, False), (True, False), (True, True))
]


class IndexFileWriter:
    """Writes the index of prepared data from its lines, sorted by split and id, in memory that does not grow."""

    def __init__(
        self, folder: Path, shards: Mapping[Split, Sequence[str]], *, optional: Collection[str] = frozenset()
    ) -> None:
        """`shards`: the names of each split's shards, in order. `optional`: columns of `index_lines.OPTIONAL`."""
        videos, prefixes, pairs = (columns[0] in optional for columns in OPTIONAL)
        self._path = folder / NAME
        self._schema = schema_of(with_videos=videos, with_prefixes=prefixes, with_pairs=pairs)
        self._shards = pa.array([*shards["train"], *shards["eval"]], pa.string())
        starts = {"train": 0, "eval": len(shards["train"])}
        self._numbers = {
            split: {name: starts[split] + number for number, name in enumerate(shards[split])} for split in SPLITS
        }
        self.file_sum = FileSum(0, 0)  # of the whole file
        self._scratch = tempfile.TemporaryDirectory(prefix=TEMPORARY_PREFIX, dir=folder)
        kinds = {field.name: _stored(field.type) for field in self._schema}
        self._columns = {
            split: {
                name: GrowingArray(kind, Path(self._scratch.name, f"{split}-{name}")) for name, kind in kinds.items()
            }
            for split in SPLITS
        }

    def __enter__(self) -> IndexFileWriter:
        return self

    def __exit__(self, error: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        with self._scratch:
            if error is None:
                self._write()

    def add(self, lines: pa.Table) -> None:
        """Add the next lines (`index_lines.SCHEMA`). Raises DataError for lists of images of unequal lengths, and for
        hashes of other sizes.
        """
        for number, split in enumerate(SPLITS):
            is_of_split = pc.equal(lines.column("split"), split)
            count = pc.sum(is_of_split).as_py()
            if not count:
                continue
            of_split = (lines if count == len(lines) else lines.filter(is_of_split)).combine_chunks()
            line = {name: of_split.column(name).combine_chunks() for name in of_split.column_names}
            made = {
                "split": pa.array(np.full(len(of_split), number, np.int8)),
                "shard": self._numbered(split, line["shard"]),
                "images": self._images(line),
                "content": _from_hex(line["content"], CONTENT_BYTES),
            }
            if PREFIX_COLUMNS[1] in self._columns[split]:
                made[PREFIX_COLUMNS[1]] = _from_hex(line[PREFIX_COLUMNS[1]], KEY_BYTES)
            for name, column in self._columns[split].items():
                column.append(made[name] if name in made else line[name].cast(_stored(self._schema.field(name).type)))

    def _write(self) -> None:
        options = pa.ipc.IpcWriteOptions(allow_64bit=True)
        with SummedFile(self._path) as out, pa.ipc.new_file(out, self._schema, options=options) as file:
            for split in SPLITS:
                columns = {name: column.whole() for name, column in self._columns[split].items()}
                for name, names in (("split", pa.array(SPLITS, pa.string())), ("shard", self._shards)):
                    columns[name] = pa.DictionaryArray.from_arrays(columns[name], names)
                file.write_batch(pa.RecordBatch.from_arrays(list(columns.values()), schema=self._schema))
        self.file_sum = out.sum

    def _numbered(self, split: Split, shards: pa.Array) -> pa.Array:
        encoded = shards.dictionary_encode()
        names = encoded.dictionary.to_pylist()  # also those of the other split, where the lines have both
        numbers = np.array([self._numbers[split].get(name, -1) for name in names], np.int32)
        of_lines = numbers[encoded.indices.to_numpy()]
        assert of_lines.min() >= 0, "the names of all shards"
        return pa.array(of_lines)

    def _images(self, line: Mapping[str, pa.Array]) -> pa.Array:
        kind = self._schema.field("images").type
        counts = pc.list_value_length(line["image_sha256"]).to_numpy()
        fields = []
        for name, (column, of_field) in IMAGE_FIELDS.items():
            if not np.array_equal(pc.list_value_length(line[column]).to_numpy(), counts):
                raise DataError(f"the index lists images of a sample whose column {column} has another length")
            values = pc.list_flatten(line[column])
            fields.append(_from_hex(values, SHA256_BYTES) if name == "sha256" else values)
            assert fields[-1].type == of_field
        if kind.value_type.num_fields > len(fields):
            fields += [_of_videos(line.get(column), counts, of) for column, of in VIDEO_FIELDS.values()]
        images = pa.StructArray.from_arrays(fields, fields=list(kind.value_type))
        offsets = pa.array(np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]))
        return pa.LargeListArray.from_arrays(offsets, images, type=kind)


def open_index(path: Path) -> dict[Split, pa.RecordBatch]:
    """The splits' columns, mapped from the file.

    Raises DataError where the file is no index, or where a column has fewer bytes than its rows need. What it holds is
    not read: offsets in it are to be checked before they are used.
    """
    try:
        with pa.memory_map(str(path)) as mapped:
            file = pa.ipc.open_file(mapped)
            if file.schema not in KNOWN:
                raise unusable(path, f"columns {file.schema.names}")
            if file.num_record_batches != len(SPLITS):
                raise unusable(path, f"{file.num_record_batches} batches")
            batches = {split: file.get_batch(number) for number, split in enumerate(SPLITS)}
        for batch in batches.values():
            batch.validate()
            if nulls := [name for name in batch.schema.names if batch.column(name).null_count]:
                raise unusable(path, f"missing values of {nulls}")
    except (pa.ArrowException, OSError) as error:
        raise unusable(path, str(error)) from error
    return batches


def read_columns(path: Path, columns: Sequence[str]) -> Iterator[tuple[Split, pa.RecordBatch]]:
    """These columns of all samples, some 65,000 at a time, each with its split. Raises DataError as `open_index`, and
    where offsets leave the file.
    """
    before = 0
    for split, batch in open_index(path).items():
        chosen = batch.select(columns)
        try:
            chosen.validate(full=True)
        except pa.ArrowException as error:
            raise unusable(path, str(error)) from error
        start = 0
        while start < len(chosen):  # up to the next multiple of ROWS_READ in the whole file
            rows = ROWS_READ - (before + start) % ROWS_READ
            yield split, chosen.slice(start, rows)
            start += rows
        before += len(chosen)


def unusable(path: Path, problem: str) -> DataError:
    return DataError(
        f"{path} is not an index of this version of the trainer: {problem}",
        expected="the columns " + ", ".join(schema_of(with_videos=False).names),
        fix="delete the DONE file beside it and run again: the data is then prepared again",
    )


def _stored(kind: pa.DataType) -> pa.DataType:
    """The type of what grows with the samples: of names, their numbers."""
    return kind.index_type if pa.types.is_dictionary(kind) else kind


def byte_rows(digits: pa.Array, width: int) -> NDArray[np.uint8]:
    """(texts, width) bytes of hexadecimal digits. Raises DataError for other texts."""
    return np.frombuffer(_bytes_of(digits, width), np.uint8).reshape(-1, width)


def _from_hex(digits: pa.Array, width: int) -> pa.Array:
    made = pa.py_buffer(_bytes_of(digits, width))
    return pa.Array.from_buffers(pa.binary(width), len(digits), [None, made], null_count=0)


def _bytes_of(digits: pa.Array, width: int) -> bytes:
    _, buffer, text = digits.buffers()
    made = b""
    if len(digits):
        offsets = np.frombuffer(buffer, np.int32)[digits.offset : digits.offset + len(digits) + 1]
        try:
            made = bytes.fromhex(str(memoryview(text or b"")[offsets[0] : offsets[-1]], "ascii"))
        except ValueError as error:
            raise DataError(f"the index has a hash that is not hexadecimal: {error}") from error
        if (np.diff(offsets) != 2 * width).any() or len(made) != width * len(digits):
            raise DataError(f"the index has a hash that has not {2 * width} hexadecimal digits")
    return made


def _of_videos(lists: pa.Array | None, counts: np.ndarray, kind: pa.DataType) -> pa.Array:
    """A value of each image from lists that are null for samples without a video."""
    values = np.zeros(int(counts.sum()), kind.to_pandas_dtype())
    if lists is not None:
        values[np.repeat(lists.is_valid().to_numpy(zero_copy_only=False), counts)] = pc.list_flatten(lists).to_numpy()
    return pa.array(values, kind)
