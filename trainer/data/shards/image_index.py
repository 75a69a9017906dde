"""Compact tables of images by content hash, a few tens of bytes per image."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vlmpipe.trainer.data.packing import Int64Array

HASH_BYTES = 32
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

    def find(self, wanted: Iterable[str] | NDArray[np.bytes_]) -> Int64Array:
        """(wanted,) position of each in the list, -1 if missing."""
        hashes = _hashes(wanted)
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


class UniqueImages(Mapping[str, ImageLocation]):
    """One location of each distinct image, ordered by location, so that each shard is read once."""

    def __init__(self, images: NDArray[np.bytes_], shards: list[str], places: Int64Array) -> None:
        """`places`: (images, 4) number of the shard, offset, bytes, whether it is a video.

        The first of equal images is used.
        """
        in_order = np.lexsort((places[:, 1], places[:, 0]))
        _, first = np.unique(images[in_order], return_index=True)
        kept = in_order[np.sort(first)]
        self._table, self._shards, self._places = ImageTable(images[kept]), shards, places[kept]

    def __getitem__(self, image: str) -> ImageLocation:
        (number,) = self._table.find([image])
        if number < 0:
            raise KeyError(image)
        shard, offset, size_bytes, is_video = self._places[number].tolist()
        return ImageLocation(self._shards[shard], offset, size_bytes, bool(is_video))

    def __iter__(self) -> Iterator[str]:
        return (digits_of(image) for image in self._table.images)

    def __len__(self) -> int:
        return len(self._table)

    @property
    def hashes(self) -> NDArray[np.bytes_]:
        """(images,) hashes of the images, in the order of iteration."""
        return self._table.images


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
