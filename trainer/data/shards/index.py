"""The index of prepared data: one line per sample, with its lengths and the location of its bytes.

Its file is mapped: all processes of a machine share its columns, and take memory for what they read only. Places in it
are checked before they are used, so that a damaged file ends in an error and never in a crash.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import pairwise
from typing import TypeVar, overload

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from vlmpipe.trainer.data.packing import Int64Array
from vlmpipe.trainer.data.prefixes.groups import KEY_BYTES, PrefixGroups
from vlmpipe.trainer.data.sample import SPLITS, Split
from vlmpipe.trainer.data.shards.image_index import HASHES, UniqueImages
from vlmpipe.trainer.data.shards.index_file import (
    CONTENT_BYTES,
    NAME,
    PAIR_FIELDS,
    PREFIX_FIELDS,
    SHA256_BYTES,
    VIDEO_FIELDS,
    open_index,
    unusable,
)
from vlmpipe.trainer.data.shards.prepared_files import open_prepared
from vlmpipe.trainer.data.shards.tar import Members
from vlmpipe.trainer.data.shards.verified_files import damaged_file
from vlmpipe.trainer.errors import DataError
from vlmpipe.trainer.sizing.image_grids import VideoSize
from vlmpipe.trainer.storage.base import Storage

Int32Array = NDArray[np.int32]
Number = TypeVar("Number", bound=np.generic)
BLOCK = 1 << 16  # samples at a time, where all are read
PATCHES, PATCH_S = VIDEO_FIELDS


class Texts(Sequence[str]):
    """A column of texts in order, each read when it is asked for."""

    def __init__(self, column: pa.LargeStringArray) -> None:
        assert not column.offset, "a whole column"
        _, offsets, text = column.buffers()
        self._offsets = np.frombuffer(offsets, np.int64, len(column) + 1) if len(column) else np.zeros(1, np.int64)
        self._text = memoryview(text or b"")

    def __len__(self) -> int:
        return len(self._offsets) - 1

    @overload
    def __getitem__(self, number: int) -> str: ...
    @overload
    def __getitem__(self, number: slice) -> list[str]: ...
    def __getitem__(self, number: int | slice) -> str | list[str]:
        if isinstance(number, slice):
            return [self[place] for place in range(len(self))[number]]
        place = range(len(self))[number]
        return next(self._from(place, place + 1))

    def __iter__(self) -> Iterator[str]:
        for first in range(0, len(self), BLOCK):
            yield from self._from(first, min(first + BLOCK, len(self)))

    def index(self, text: str, start: int = 0, stop: int | None = None) -> int:
        """Place of a text in a column that is in order. Raises ValueError if it is not there."""
        place = bisect_left(self, text, start, stop)
        if place < (len(self) if stop is None else min(stop, len(self))) and self[place] == text:
            return place
        raise ValueError(f"{text!r} is not in the column")

    def __contains__(self, text: object) -> bool:
        with suppress(ValueError):
            return isinstance(text, str) and self.index(text) >= 0
        return False

    def _from(self, first: int, end: int) -> Iterator[str]:
        for start, stop in pairwise(self._offsets[first : end + 1].tolist()):
            if not 0 <= start <= stop <= len(self._text):
                raise _damaged(f"a text from byte {start:,} to {stop:,} of {len(self._text):,}")
            try:
                yield str(self._text[start:stop], "utf-8")
            except UnicodeDecodeError as error:
                raise _damaged(str(error)) from error


class SplitIndex:
    """The samples of one split, ordered by id. Sample numbers are positions in it. Arrays are not to be written to."""

    def __init__(self, name: Split, columns: pa.RecordBatch) -> None:
        """`columns`: of `open_index`."""
        self.name = name
        images, self._shard_column = columns.column("images"), columns.column("shard")
        values = {field.name: images.values.field(number) for number, field in enumerate(images.type.value_type)}
        self._sha256 = _hashes(values.pop("sha256"))  # (images,), as all columns of images
        self._of_images = {field: _numbers(column, np.dtype(str(column.type)).type) for field, column in values.items()}
        self._first_image = _numbers(images.offsets, np.int64)  # (samples + 1,)
        self.ids, self._keys = Texts(columns.column("id")), Texts(columns.column("key"))
        self.tokens: Int32Array = _numbers(columns.column("tokens"), np.int32)  # (samples,)
        self.label_tokens: Int32Array = _numbers(columns.column("label_tokens"), np.int32)  # (samples,)
        self.image_tokens: Int32Array = _numbers(
            columns.column("image_tokens"), np.int32
        )  # (samples,) of all images of each
        self.turns: Int32Array = _numbers(columns.column("turns"), np.int32)  # (samples,)
        self._json_offset: Int64Array = _numbers(columns.column("json_offset"), np.int64)
        self._json_bytes: Int32Array = _numbers(columns.column("json_bytes"), np.int32)
        self._content = _rows_of(columns.column("content"), CONTENT_BYTES)
        names = columns.schema.names
        self._prefixes = [columns.column(name) for name, _ in (*PREFIX_FIELDS, *PAIR_FIELDS) if name in names]

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def has_prefixes(self) -> bool:
        """Return whether the data was prepared with `data.share_prefix`."""
        return bool(self._prefixes)

    def prefix_groups(self, max_branches: int) -> PrefixGroups:
        """Groups of samples that share a prefix. Raises DataError for data that was prepared without prefixes."""
        if not self.has_prefixes:
            raise DataError(
                "the prepared data does not say which tokens samples share",
                expected="data prepared with data.share_prefix on",
                fix="run the run file, which prepares its data, or set data.share_prefix off",
            )
        return PrefixGroups.of(self.prefix_keys, self.prefix_tokens, max_branches)

    @property
    def prefix_tokens(self) -> Int32Array:
        """(samples,) tokens of each sample's prefix, 0 where it shares none."""
        return _numbers(self._prefixes[0], np.int32)

    @property
    def prefix_keys(self) -> NDArray[np.uint8]:
        """(samples, bytes) key of each sample's prefix; equal for equal prefixes."""
        return _rows_of(self._prefixes[1], KEY_BYTES)

    @property
    def pair_prefix_tokens(self) -> Int32Array:
        """(samples,) tokens that both conversations of each pair begin with, 0 where they share none. Only of pairs
        whose data `has_prefixes`.
        """
        return _numbers(self._prefixes[2], np.int32)

    @property
    def has_videos(self) -> bool:
        """Return whether the data set has any that the model takes as such."""
        return PATCHES in self._of_images

    def number(self, identity: str) -> int | None:
        """Number of the sample with this id; None if there is none."""
        with suppress(ValueError):
            return self.ids.index(identity)
        return None

    @cached_property
    def shards(self) -> list[str]:
        """The names of the split's shards, in order."""
        names, numbers = self._shard_column.dictionary, _numbers(self._shard_column.indices, np.int32)
        first, last = (int(numbers.min()), int(numbers.max())) if len(numbers) else (0, -1)
        if not 0 <= first <= last + 1 <= len(names):
            raise _damaged(f"shards {first} to {last} of {len(names)}")
        try:
            names.validate(full=True)
        except pa.ArrowInvalid as error:
            raise _damaged(str(error)) from error
        of_split: list[str] = names[first : last + 1].to_pylist()
        return of_split

    @cached_property
    def shard_numbers(self) -> Int32Array:
        """(samples,) position of each sample's shard in `shards`."""
        numbers: Int32Array = _numbers(self._shard_column.indices, np.int32)
        first = int(numbers.min()) if len(numbers) else 0
        return numbers - np.int32(first) if first else numbers

    @cached_property
    def image_count(self) -> Int32Array:
        """(samples,) images of each sample."""
        first = self._first_image
        if not (first[0] == 0 and first[-1] == len(self._sha256) and (first[1:] >= first[:-1]).all()):
            raise _damaged(f"places of images that do not ascend from 0 to {len(self._sha256):,}")
        counts = np.empty(len(self), np.int32)
        return np.subtract(first[1:], first[:-1], out=counts, casting="same_kind")

    def sample_location(self, number: int) -> Members:
        """Location of the sample's bytes."""
        of_sample = self._images_of(number)
        return Members(
            shard=self.shards[self.shard_numbers[number]],
            json_offset=int(self._json_offset[number]),
            json_bytes=int(self._json_bytes[number]),
            image_offsets=self._of_images["offset"][of_sample].tolist(),
            image_bytes=self._of_images["bytes"][of_sample].tolist(),
            are_videos=(self._of_images[PATCHES][of_sample] > 0).tolist() if self.has_videos else [],
        )

    def content(self, number: int) -> str:
        """The `sample_digest` of a sample."""
        return self._content[number].tobytes().hex()

    def mean_stored_bytes(self, *, images: bool) -> float:
        """Mean bytes of a sample in its shard: the text, and where asked for, all images."""
        of_images = int(self._of_images["bytes"].sum()) if images else 0
        return (int(self._json_bytes.sum(dtype=np.int64)) + of_images) / max(1, len(self))

    def key(self, number: int) -> str:
        """The sample's name in its shard."""
        return self._keys[number]

    def stored_order(self) -> Int64Array:
        """(samples,) sample numbers in the order of their bytes."""
        return np.lexsort((self._json_offset, self.shard_numbers)).astype(np.int64)

    def shown(self) -> Int32Array:
        """(samples,) images of each sample; each patch in time of a video counts as an image."""
        if not self.has_videos:
            return self.image_count
        return self._summed(lambda images: np.maximum(self._of_images[PATCHES][images], 1))

    def tokens_with(self, max_kept: int) -> Int32Array:
        """(samples,) tokens of each sample with at most `max_kept` tokens of each image."""
        left_out = self._summed(lambda images: np.maximum(self._of_images["tokens"][images] - max_kept, 0))
        return np.subtract(self.tokens, left_out, out=left_out)

    def image_sha256(self, number: int) -> list[str]:
        """Content hash of each of the sample's images, in order of their marks."""
        hashes = self._sha256[self._images_of(number)].tobytes()
        return [hashes[start : start + SHA256_BYTES].hex() for start in range(0, len(hashes), SHA256_BYTES)]

    def image_token_counts(self, number: int) -> list[int]:
        """Tokens of each of the sample's images."""
        counts: list[int] = self._of_images["tokens"][self._images_of(number)].tolist()
        return counts

    def image_sizes(self, number: int) -> list[tuple[int, int]]:
        """(width, height) in pixels of each of the sample's images; of videos a VideoSize."""
        of_sample = self._images_of(number)
        width, height = (self._of_images[name][of_sample].tolist() for name in ("width", "height"))
        sizes = list(zip(width, height, strict=True))
        if not self.has_videos:
            return sizes
        patches, patch_s = (self._of_images[name][of_sample].tolist() for name in (PATCHES, PATCH_S))
        return [
            VideoSize(*size, count, seconds) if count else size
            for size, count, seconds in zip(sizes, patches, patch_s, strict=True)
        ]

    def images(self) -> NDArray[np.bytes_]:
        """(images,) content hashes of all samples' images, `image_count` of each sample."""
        return self._sha256

    def image_places(self, rows: Int64Array) -> Int64Array:
        """(rows, 4) number of the shard, offset, bytes, and whether it is a video, of these of `images`."""
        first = self._first_image
        samples = np.searchsorted(first, rows, side="right") - 1
        is_known = (samples >= 0) & (samples < len(self))
        if not is_known.all() or not ((first[samples] <= rows) & (rows < first[samples + 1])).all():
            raise _damaged(f"places of images that do not ascend from 0 to {len(self._sha256):,}")
        videos = self._of_images[PATCHES][rows] > 0 if self.has_videos else np.zeros(len(rows), np.bool_)
        places = [self.shard_numbers[samples], self._of_images["offset"][rows], self._of_images["bytes"][rows], videos]
        return np.stack(places, axis=1).astype(np.int64)

    def _images_of(self, number: int) -> slice:
        """The sample's images in the columns of images."""
        start, stop = self._first_image[number], self._first_image[number + 1]
        if not 0 <= start <= stop <= len(self._sha256):
            raise _damaged(f"images {start:,} to {stop:,} of {len(self._sha256):,}")
        return slice(start, stop)

    def _summed(self, values: Callable[[slice], NDArray[np.int32]]) -> Int32Array:
        """(samples,) sums over each sample's images. `values`: of a range of images."""
        sums = np.empty(len(self), np.int32)
        for first in range(0, len(self), BLOCK):
            counts = self.image_count[first : first + BLOCK]
            images = slice(self._first_image[first], self._first_image[first + len(counts)])
            owners = np.repeat(np.arange(len(counts)), counts)
            sums[first : first + BLOCK] = np.bincount(owners, values(images), len(counts))
        return sums


class Index:
    """All splits of one prepared data set."""

    def __init__(self, uri: str, splits: dict[Split, SplitIndex]) -> None:
        self.uri, self._splits = uri, splits

    @classmethod
    def load(cls, prepared_uri: str, storage: Storage | None = None) -> Index:
        """Map the index at `prepared_uri`. Raises DataError when it is damaged or of another version."""
        path = (storage or open_prepared(prepared_uri)).fetch(NAME)
        try:
            return cls(prepared_uri, {name: SplitIndex(name, columns) for name, columns in open_index(path).items()})
        except (pa.ArrowException, ValueError) as error:
            raise unusable(path, str(error)) from error

    def split(self, name: Split) -> SplitIndex:
        return self._splits[name]

    def unique_images(self) -> UniqueImages:
        """A location of every distinct image of all splits."""
        return UniqueImages([self._splits[name] for name in SPLITS])


def _rows_of(column: pa.FixedSizeBinaryArray, width: int) -> NDArray[np.uint8]:
    """(rows, width) bytes of a column."""
    return np.frombuffer(column.buffers()[1] if len(column) else b"", np.uint8).reshape(-1, width)


def _numbers(column: pa.Array, kind: type[Number]) -> NDArray[Number]:
    """The numbers of a column where they lie. `to_numpy` of pyarrow imports pandas: a second and 22 MiB a process."""
    if not len(column):
        return np.empty(0, kind)
    return np.frombuffer(column.buffers()[1], kind, len(column), column.offset * np.dtype(kind).itemsize)


def _hashes(column: pa.FixedSizeBinaryArray) -> NDArray[np.bytes_]:
    if not len(column):
        return np.empty(0, HASHES)
    return np.frombuffer(column.buffers()[1], HASHES, len(column))


def _damaged(how: str) -> DataError:
    return damaged_file(NAME, how)
