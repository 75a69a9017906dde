"""Compact tables of images by content hash, a few tens of bytes per image."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from vlmpipe.trainer.data.packing import Int64Array

HASH_BYTES = 32
PARTS = 64  # that hashes, or shards, are divided into: memory holds one
BLOCK = 1 << 16  # images at a time, where all are read
HASHES = f"S{HASH_BYTES}"  # bytes of SHA-256. An item of such an array lacks zeros at its end: see `digits_of`


class ImageTable:
    """Finds content hashes in a list. Hashes are hexadecimal digits, or arrays of their bytes (`hashes_of`)."""

    def __init__(self, images: Iterable[str] | NDArray[np.bytes_]) -> None:
        """`images`: (images,) hashes; the first of equal ones is found."""
        self.images: NDArray[np.bytes_] = _hashes(images)
        self._order = np.argsort(self.images, kind="stable")
        self._sorted = self.images[self._order]

    def __len__(self) -> int:
        return len(self.images)

    def find(self, images: Iterable[str] | NDArray[np.bytes_]) -> Int64Array:
        """(wanted,) position of each in the list, -1 if missing."""
        hashes = _hashes(images)
        if not len(self):
            return np.full(len(hashes), -1)
        place = np.minimum(np.searchsorted(self._sorted, hashes), len(self) - 1)
        return np.where(self._sorted[place] == hashes, self._order[place], -1)


@dataclass(frozen=True, slots=True)
class ImageLocation:
    """Location of an image's encoded bytes."""

    shard: str
    offset: int
    bytes: int
    is_video: bool = False


class StoredImages(Protocol):
    """The images of a split, by their row: see `SplitIndex`."""

    @property
    def shards(self) -> list[str]: ...
    def images(self) -> NDArray[np.bytes_]: ...
    def image_places(self, rows: Int64Array) -> Int64Array: ...


class UniqueImages(Mapping[str, ImageLocation]):
    """One location of each distinct image, ordered by location, so that each shard is read once.

    Holds the row of each in the mapped index, 4 bytes an image, and as many once one is looked up by its hash.
    """

    def __init__(self, splits: Sequence[StoredImages], rows: NDArray[np.integer] | None = None) -> None:
        """`splits`: the first of equal images is used. `rows`: of these images alone; None: of all distinct ones."""
        self._splits = splits
        self._first_rows = np.cumsum([0, *(len(split.images()) for split in splits)])  # of each split, and the total
        self._first_shards = np.cumsum([0, *(len(split.shards) for split in splits)])
        self._shards = [shard for split in splits for shard in split.shards]
        self._kind = np.int32 if self._first_rows[-1] < 1 << 31 else np.int64
        self._rows = self._in_order(self._distinct()) if rows is None else rows  # (images,)
        self._by_hash: NDArray[np.integer] | None = None

    def __getitem__(self, image: str) -> ImageLocation:
        digest = hashes_of([image])[0]
        if self._by_hash is None:
            self._by_hash = self._ordered_by_hash()
        place = bisect_left(self._by_hash, digest, key=lambda number: self._hashes(self._rows[[number]])[0])
        number = self._by_hash[place : place + 1]
        if not len(number) or self._hashes(self._rows[number])[0] != digest:
            raise KeyError(image)
        return self.locations(int(number[0]), int(number[0]) + 1)[0]

    def __iter__(self) -> Iterator[str]:
        for first in range(0, len(self), BLOCK):
            yield from self.digits(first, first + BLOCK)

    def __len__(self) -> int:
        return len(self._rows)

    def digits(self, first: int, end: int) -> list[str]:
        """The hashes of a range of images."""
        return [digits_of(image) for image in self._hashes(self._rows[first:end])]

    def locations(self, first: int, end: int) -> list[ImageLocation]:
        """The locations of a range of images."""
        places = self._places(self._rows[first:end]).tolist()
        return [ImageLocation(self._shards[shard], offset, size, bool(video)) for shard, offset, size, video in places]

    def lacking(self, find: Callable[[NDArray[np.bytes_]], Int64Array]) -> NDArray[np.bool_]:
        """(images,) whether `find` gives -1 for the hash of an image."""
        lacking = np.empty(len(self), np.bool_)
        for first in range(0, len(self), BLOCK):
            lacking[first : first + BLOCK] = find(self._hashes(self._rows[first : first + BLOCK])) < 0
        return lacking

    def only(self, chosen: NDArray[np.bool_]) -> UniqueImages:
        """These images alone, in the same order."""
        return UniqueImages(self._splits, self._rows[chosen])

    def _distinct(self) -> NDArray[np.bool_]:
        """(rows,) whether a row is the first, by location, of those with its hash. Hashes are taken part by part."""
        distinct, parts = np.zeros(self._first_rows[-1], np.bool_), np.empty(self._first_rows[-1], np.uint8)
        for first in range(0, len(parts), BLOCK):
            rows = np.arange(first, min(first + BLOCK, len(parts)))
            parts[rows] = self._parts_of(rows)
        for part in range(PARTS):
            rows = np.flatnonzero(parts == part)
            rows = rows[self._location_order(rows)]
            _, first_of_equal = np.unique(self._hashes(rows), return_index=True)
            distinct[rows[first_of_equal]] = True
        return distinct

    def _in_order(self, distinct: NDArray[np.bool_]) -> NDArray[np.integer]:
        """The rows that are distinct, by location. Shards are taken part by part."""
        in_order: NDArray[np.integer] = np.empty(int(distinct.sum()), self._kind)
        done = 0
        parts = np.full(len(distinct), PARTS, np.uint8)
        for first in range(0, len(parts), BLOCK):
            rows = first + np.flatnonzero(distinct[first : first + BLOCK])
            parts[rows] = self._places(rows)[:, 0] * PARTS // max(1, len(self._shards))
        for part in range(PARTS):
            rows = np.flatnonzero(parts == part)
            in_order[done : done + len(rows)] = rows[self._location_order(rows)]
            done += len(rows)
        return in_order

    def _ordered_by_hash(self) -> NDArray[np.integer]:
        """(images,) numbers of the images in the order of their hashes. Hashes are taken part by part."""
        ordered: NDArray[np.integer] = np.empty(len(self), self._kind)
        done = 0
        parts = np.empty(len(self), np.uint8)
        for first in range(0, len(self), BLOCK):
            parts[first : first + BLOCK] = self._parts_of(self._rows[first : first + BLOCK])
        for part in range(PARTS):
            numbers = np.flatnonzero(parts == part)
            ordered[done : done + len(numbers)] = numbers[np.argsort(self._hashes(self._rows[numbers]), kind="stable")]
            done += len(numbers)
        return ordered

    def _parts_of(self, rows: NDArray[np.integer]) -> NDArray[np.uint8]:
        """(rows,) part of the hashes, in their order, that each belongs to."""
        first_bytes = np.frombuffer(self._hashes(rows).tobytes(), np.uint8)[::HASH_BYTES]
        return first_bytes // np.uint8(256 // PARTS)

    def _location_order(self, rows: Int64Array) -> Int64Array:
        places = self._places(rows)
        return np.lexsort((places[:, 1], places[:, 0])).astype(np.int64)

    def _hashes(self, rows: NDArray[np.integer]) -> NDArray[np.bytes_]:
        hashes = np.empty(len(rows), HASHES)
        for number, split in enumerate(self._splits):
            of_split = self._of_split(rows, number)
            hashes[of_split] = split.images()[rows[of_split] - self._first_rows[number]]
        return hashes

    def _places(self, rows: NDArray[np.integer]) -> Int64Array:
        """(rows, 4) number of the shard, offset, bytes, and whether it is a video."""
        places = np.empty((len(rows), 4), np.int64)
        for number, split in enumerate(self._splits):
            of_split = self._of_split(rows, number)
            places[of_split] = split.image_places(rows[of_split] - self._first_rows[number])
            places[of_split, 0] += self._first_shards[number]
        return places

    def _of_split(self, rows: NDArray[np.integer], number: int) -> NDArray[np.bool_]:
        return (self._first_rows[number] <= rows) & (rows < self._first_rows[number + 1])


def hashes_of(images: Iterable[str]) -> NDArray[np.bytes_]:
    """(images,) bytes of hexadecimal digits. Raises ValueError for other texts."""
    hashes = [bytes.fromhex(image) for image in images]
    if any(len(digest) != HASH_BYTES for digest in hashes):
        raise ValueError(f"a hash of an image has not {2 * HASH_BYTES} digits")
    return np.frombuffer(b"".join(hashes), HASHES) if hashes else np.empty(0, HASHES)


def digits_of(image: bytes) -> str:
    """Hexadecimal digits of an item of an array of hashes."""
    return image.ljust(HASH_BYTES, b"\0").hex()


def _hashes(images: Iterable[str] | NDArray[np.bytes_]) -> NDArray[np.bytes_]:
    return images if isinstance(images, np.ndarray) else hashes_of(images)
