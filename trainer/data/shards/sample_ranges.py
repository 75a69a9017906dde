"""Reads samples of shards in a bucket by range: one request a sample, several under way, nothing on the disk.

An image that is stored with an earlier sample of its shard (`data.share_prefix`) is a request of its own.

A range cannot be compared with a shard's checksum. Instead each sample is compared with the index: the digest of its
texts and labels (`content`), its id, and the SHA-256 of each image that is read. Every request names the version of the
shard that was listed at the start, whose size, and checksum where the store lists it, are those of DONE.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from vlmpipe.trainer.data.sample import Turn, sample_digest
from vlmpipe.trainer.data.shards.index import SplitIndex
from vlmpipe.trainer.data.shards.prepared_files import Manifest
from vlmpipe.trainer.data.shards.tar import ShardReader, sample_of
from vlmpipe.trainer.data.shards.verified_files import FOLDER, damaged_file
from vlmpipe.trainer.errors import DataError
from vlmpipe.trainer.models.video_file import VideoFile
from vlmpipe.trainer.storage.base import Storage, VersionConflictError
from vlmpipe.trainer.storage.outage import patiently
from vlmpipe.trainer.storage.transfer import in_parallel

FETCHES = 2  # attempts, if a sample arrives damaged
THREADS = 16  # requests under way, of a rank
IN_FLIGHT_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class _Sample:
    number: int
    turns: tuple[Turn, ...]
    images: list[bytes]


class ShardSamples:
    """A split's samples from whole shards."""

    def __init__(self, split: SplitIndex, reader: ShardReader) -> None:
        self._split, self._reader = split, reader

    def expect(self, numbers: Sequence[int], *, brings_images: Sequence[bool] = ()) -> None:
        """Whole shards are fetched ahead by their own schedule."""

    def turns(self, number: int) -> tuple[Turn, ...]:
        return self._reader.turns(self._split.sample_location(number))

    def images(self, number: int) -> list[bytes]:
        return self._reader.images(self._split.sample_location(number))


class SampleRanges:
    """A split's samples by range. For one thread, which reads those that it `expect`s in their order.

    Raises DataError for a sample that is damaged, or a shard that was replaced; the store's error when it does not
    answer for `patience_s`.
    """

    def __init__(
        self, split: SplitIndex, storage: Storage, versions: Mapping[str, str], *, images: bool, patience_s: float
    ) -> None:
        """`versions`: of each shard, see `shard_versions`. `images`: also read the encoded images."""
        self._split, self._storage, self._versions = split, storage, versions
        self._with_images, self._patience_s = images, patience_s
        self._expected: Iterator[_Sample] = iter(())
        self._current: _Sample | None = None

    def expect(self, numbers: Sequence[int], *, brings_images: Sequence[bool] = ()) -> None:
        """Begin to read these samples, in this order; one that is drawn several times is read as often.

        brings_images: of each, whether its images are asked for, where any are read; empty: of all.
        """
        self._current = None
        flags = [self._with_images and brings for brings in brings_images or [True] * len(numbers)]
        self._expected = in_parallel(
            self._read,
            zip(numbers, flags, strict=True),
            threads=THREADS,
            weigh=lambda asked: sum(end - start for start, end in self._ranges(*asked)),
            max_bytes=IN_FLIGHT_BYTES,
        )

    def turns(self, number: int) -> tuple[Turn, ...]:
        """The conversation of the next sample."""
        self._current = next(self._expected)
        assert self._current.number == number, "samples are read in the expected order"
        return self._current.turns

    def images(self, number: int) -> list[bytes]:
        """The encoded images of the sample of the last `turns`, in order of their marks; of videos a VideoFile."""
        assert self._current is not None and self._current.number == number, "a sample's turns are read first"
        return self._current.images

    def _ranges(self, number: int, brings_images: bool) -> list[tuple[int, int]]:
        """First byte in its shard, and the one after the last, of a sample with the images that are stored with it, and
        of each image that is stored with an earlier sample."""
        place = self._split.sample_location(number)
        start, end = place.json_offset, place.json_offset + place.json_bytes
        if not brings_images:
            return [(start, end)]
        images = [(offset, offset + size) for offset, size in zip(place.image_offsets, place.image_bytes, strict=True)]
        end = max([end, *(stop for at, stop in images if at >= start)])
        return [(start, end), *dict.fromkeys(image for image in images if image[0] < start)]

    def _read(self, asked: tuple[int, bool]) -> _Sample:
        problem, (number, brings_images) = "", asked
        ranges = self._ranges(*asked)
        for _ in range(FETCHES):
            data = patiently(
                "reading samples of a bucket",
                lambda: {start: self._bytes(number, start, end) for start, end in ranges},
                limit_s=self._patience_s,
            )
            try:
                return self._verified(number, data, brings_images=brings_images)
            except ValueError as error:
                problem = str(error)
        shard = self._split.sample_location(number).shard
        raise self._damaged(shard, f"sample {self._split.ids[number]}: {problem} ({FETCHES} times)")

    def _bytes(self, number: int, start: int, end: int) -> bytes:
        shard = self._split.sample_location(number).shard
        try:
            return self._storage.read_range(shard, start, end, version=self._versions[shard])
        except VersionConflictError as error:
            raise self._damaged(shard, "it was replaced while training read it") from error

    def _verified(self, number: int, data: Mapping[int, bytes], *, brings_images: bool) -> _Sample:
        """The sample in the bytes of its ranges, by offset. Raises ValueError where they differ from the index."""
        place = self._split.sample_location(number)
        for start, end in self._ranges(number, brings_images):
            if len(data[start]) != end - start:
                raise ValueError(f"{len(data[start]):,} of {end - start:,} bytes arrived")
        json_bytes = data[place.json_offset]
        sha256 = self._split.image_sha256(number)
        try:
            identity, turns = sample_of(json_bytes[: place.json_bytes])
            content = sample_digest(turns, sha256)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"its text cannot be read: {error}") from error
        if (identity, content) != (self._split.ids[number], self._split.content(number)):
            raise ValueError("its text differs from the index")
        images: list[bytes] = []
        are_videos = place.are_videos or [False] * len(sha256)
        if brings_images:
            for n, digest in enumerate(sha256):
                at, size = place.image_offsets[n] - place.json_offset, place.image_bytes[n]
                image = json_bytes[at : at + size] if at >= 0 else data[place.image_offsets[n]][:size]
                if hashlib.sha256(image).hexdigest() != digest:
                    raise ValueError(f"its image {n} differs from the index")
                images.append(VideoFile(image) if are_videos[n] else image)
        return _Sample(number, turns, images)

    def _damaged(self, shard: str, how: str) -> DataError:
        return damaged_file(f"shard {shard}", how)


def shard_versions(storage: Storage, shards: Sequence[str]) -> dict[str, str]:
    """The version of each shard, by one listing. `storage` is that of the prepared data.

    Raises DataError for a shard that is missing, or whose size differs from DONE, or its checksum where one is listed.
    """
    expected, listed = Manifest.read(storage).files, {info.name: info for info in storage.list(FOLDER)}
    for shard in shards:
        info, sums = listed.get(shard), expected.get(shard)
        if info is None or sums is None:
            raise damaged_file(f"shard {shard}", "it is missing" if info is None else "DONE does not list it")
        if info.size_bytes != sums.bytes:
            raise damaged_file(f"shard {shard}", f"{info.size_bytes} bytes instead of {sums.bytes}")
        if info.crc32c not in (None, sums.crc32c):
            raise damaged_file(f"shard {shard}", "its checksum (CRC32C) differs from that in DONE")
    return {shard: listed[shard].version for shard in shards}
