"""Writes and reads shards: WebDataset tars with random access to members and a sidecar with the checksum."""

from __future__ import annotations

import json
import os
import re
import tarfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import BinaryIO

from vlmpipe.trainer.data.sample import Turn, stable_digest
from vlmpipe.trainer.data.shards.disk_cache import open_shards
from vlmpipe.trainer.data.shards.image_index import ImageLocation
from vlmpipe.trainer.data.shards.verified_files import FOLDER, DataShards, ShardFiles, Sidecar, sidecar_name
from vlmpipe.trainer.errors import os_errors
from vlmpipe.trainer.models.video_file import VideoFile
from vlmpipe.trainer.storage.base import Storage, crc32c_of_file

REQUIRED = ("question", "answer", "slice")  # of a turn; its other fields are written where they are not empty
TURN_FIELDS = tuple(field.name for field in fields(Turn))
KEY = re.compile(r"[A-Za-z0-9_-]{1,100}")

# A member's header is name, fixed fields, size, time, checksum and fixed fields, by their places in a block:
# https://www.gnu.org/software/tar/manual/html_node/Standard.html
NAME_BYTES, SIZE_AT, SIZE_END, SUM_AT, SUM_END = tarfile.LENGTH_NAME, 124, 136, 148, 156
MAX_OCTAL_BYTES = 8**11
EMPTY_HEADER = tarfile.TarInfo().tobuf(tarfile.GNU_FORMAT)
FIXED_SUM = sum(EMPTY_HEADER) - sum(EMPTY_HEADER[SUM_AT:SUM_END]) - sum(EMPTY_HEADER[SIZE_AT:SIZE_END])
FIXED_SUM += ord(" ") * (SUM_END - SUM_AT)  # the checksum is taken with spaces in its place


@dataclass(frozen=True, slots=True)
class Members:
    """Location of a sample's members: byte offsets into the tar file, and lengths."""

    shard: str
    json_offset: int
    json_bytes: int
    image_offsets: list[int]
    image_bytes: list[int]
    are_videos: list[bool] = field(default_factory=list)  # by image; empty where none is


def key_of(identity: str) -> str:
    """A WebDataset key for an id: the id itself if it is plain, else a readable part and a hash.

    A dot would end the key early, a slash would make folders.
    """
    if KEY.fullmatch(identity):
        return identity
    return re.sub(r"[^A-Za-z0-9_-]+", "-", identity)[:60] + "-" + stable_digest(identity)[:16]


def shard_name(split: str, number: int) -> str:
    return f"{FOLDER}/{split}-{number:06d}.tar"


def sample_json(identity: str, turns: Sequence[Turn]) -> bytes:
    """The `<key>.json` member."""
    spoken = [
        {name: value for name in TURN_FIELDS if (value := getattr(turn, name)) or name in REQUIRED}
        | ({"fields": dict(turn.fields)} if turn.fields else {})
        for turn in turns
    ]
    return json.dumps({"id": identity, "turns": spoken}, ensure_ascii=False).encode()


def sample_of(data: bytes) -> tuple[str, tuple[Turn, ...]]:
    """The id and the conversation in a `<key>.json` member."""
    record = json.loads(data)
    return record["id"], tuple(
        Turn(
            **{
                **turn,
                "region": tuple(turn.get("region", ())),
                "results": tuple(turn.get("results", ())),
                "fields": tuple(turn.get("fields", {}).items()),
            }
        )
        for turn in record["turns"]
    )


def write_sidecar(folder: Path, sidecar: Sidecar) -> None:
    (folder / sidecar_name(sidecar.shard)).write_text(json.dumps(asdict(sidecar)), encoding="utf-8")


class ShardWriter:
    """Writes one split's samples to `<folder>/shards/<split>-NNNNNN.tar`, `shard_samples` to each."""

    def __init__(self, folder: Path, split: str, shard_samples: int) -> None:
        self._folder, self._split, self._shard_samples = folder, split, shard_samples
        self._tar: BinaryIO | None = None
        self._shard = ""
        self._samples = self._offset = 0
        self._stored: dict[str, int] = {}  # offset in the shard of images that are stored once, by their hash
        self.shards = 0  # completed
        (folder / FOLDER).mkdir(parents=True, exist_ok=True)

    def add(self, key: str, sample: bytes, images: Sequence[tuple[str, bytes]], hashes: Sequence[str] = ()) -> Members:
        """Append a sample: its JSON, and (extension, bytes) of each image.

        hashes: content hash of each image, of which those in the shard already are not stored again; empty: all are.
        """
        if self._tar is None:
            self._shard = shard_name(self._split, self.shards)
            self._tar, self._offset = (self._folder / self._shard).open("wb"), 0
        json_offset = self._member(f"{key}.json", sample)
        image_offsets = []
        for n, (extension, data) in enumerate(images):
            offset = self._stored.get(hashes[n]) if hashes else None
            if offset is None:
                offset = self._member(f"{key}.{n}.{extension}", data)
                self._stored.update({hashes[n]: offset} if hashes else {})
            image_offsets.append(offset)
        members = Members(self._shard, json_offset, len(sample), image_offsets, [len(data) for _, data in images])
        self._samples += 1
        if self._samples == self._shard_samples:
            self.close()
        return members

    def close(self) -> None:
        """End the current shard and write its sidecar."""
        if self._tar is None:
            return
        end = self._offset + 2 * tarfile.BLOCKSIZE
        self._tar.write(bytes(-end % tarfile.RECORDSIZE + 2 * tarfile.BLOCKSIZE))
        self._tar.close()
        path = self._folder / self._shard
        sidecar = Sidecar(self._shard, self._samples, path.stat().st_size, crc32c_of_file(path))
        write_sidecar(self._folder, sidecar)
        self._tar, self._samples, self._stored = None, 0, {}
        self.shards += 1

    def _member(self, name: str, data: bytes) -> int:
        """Append a member. Returns the offset of its data."""
        assert self._tar is not None
        header = member_header(name, len(data))
        self._tar.write(header)
        self._tar.write(data)
        self._tar.write(bytes(-len(data) % tarfile.BLOCKSIZE))
        start = self._offset + len(header)
        self._offset = start + -(-len(data) // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
        return start


def member_header(name: str, size_bytes: int) -> bytes:
    """The header of a member, as `tarfile` makes it in a fifth of the time.

    GNU's format has names over 100 characters. Without times and owners, equal data gives equal bytes.
    """
    encoded = name.encode()
    if len(encoded) > NAME_BYTES or size_bytes >= MAX_OCTAL_BYTES:
        info = tarfile.TarInfo(name)
        info.size = size_bytes
        return info.tobuf(tarfile.GNU_FORMAT)
    size = b"%011o\0" % size_bytes
    return b"".join(
        (
            encoded.ljust(NAME_BYTES, b"\0"),
            EMPTY_HEADER[NAME_BYTES:SIZE_AT],
            size,
            EMPTY_HEADER[SIZE_END:SUM_AT],
            b"%06o\0 " % (FIXED_SUM + sum(encoded) + sum(size)),
            EMPTY_HEADER[SUM_END:],
        )
    )


class ShardReader:
    """Random access to members of verified shards. Safe to use from several threads."""

    def __init__(self, files: ShardFiles) -> None:
        self._files = files

    @classmethod
    def open(cls, storage: Storage, cache_gib: float = 0.0) -> ShardReader:
        """A reader of prepared data; see `open_shards`."""
        return cls(*open_shards(DataShards(storage), cache_gib=cache_gib))

    def read(self, shard: str, offset: int, size_bytes: int) -> bytes:
        """Bytes of one member. Raises DataError when the shard is missing or damaged."""
        with self._files.opened(shard) as handle, os_errors(f"reading {shard}"):
            data = os.pread(handle, size_bytes, offset)
        if len(data) != size_bytes:
            raise self._files.shards.damaged(shard, f"it ended at byte {offset + len(data)} while being read")
        return data

    def turns(self, members: Members) -> tuple[Turn, ...]:
        """The conversation of a sample."""
        return sample_of(self.read(members.shard, members.json_offset, members.json_bytes))[1]

    def images(self, members: Members) -> list[bytes]:
        """The encoded (JPEG, PNG or WebP) images of a sample, in order of their marks; of videos a VideoFile."""
        are_videos = members.are_videos or [False] * len(members.image_offsets)
        places = zip(members.image_offsets, members.image_bytes, are_videos, strict=True)
        return [self.image(ImageLocation(members.shard, *place)) for place in places]

    def image(self, place: ImageLocation) -> bytes:
        """The encoded bytes of one image; of a video a VideoFile."""
        data = self.read(place.shard, place.offset, place.bytes)
        return VideoFile(data) if place.is_video else data
