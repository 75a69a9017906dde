"""A node's manifest of its uploaded files: sizes and checksums, signed if the run has a key.

A file has one checksum of the whole, by which the store accepts it, and one of each of its blocks, by which a reader
verifies the ranges that it reads. CRC32C detects accidents cheaply, but can be forged. With a key, blocks have a
SHA-256 instead, and manifests and COMMIT are signed by HMAC-SHA256 over their content and name.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import google_crc32c
from pydantic import Field, TypeAdapter

from vlmpipe.trainer.config.checkpoint import CheckpointConfig
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.records.record import Part
from vlmpipe.trainer.storage.base import CHUNK_BYTES, clean_name, crc32c_of
from vlmpipe.trainer.storage.regular_files import read_regular

LARGEST_KEY_BYTES = 1 << 20
MIN_BLOCK_BYTES = 1 << 10
MAX_BLOCKS = 1 << 15  # of a file: 128 KiB of CRC32C. A range of 1/1000 of a file reads at most 6 % beside it.
# Of all files of a save, whose digests each rank of a resume receives: 4 MiB of CRC32C. Ranks above 32 have fewer each.
MAX_SAVE_BLOCKS = 1 << 20
DIGEST_BYTES = {False: 4, True: 32}  # CRC32C, SHA-256


class DamagedError(Exception):
    """Why a checkpoint must not be loaded."""


@dataclass(frozen=True)
class FileSums:
    """Size and checksums of a file. `blocks` holds the digest of each block, the last of which may be shorter."""

    size_bytes: int
    crc32c: int
    block_bytes: int
    blocks: bytes
    is_sha256: bool = False  # digests of blocks; else CRC32C

    @property
    def digest_name(self) -> str:
        return "SHA-256" if self.is_sha256 else "CRC32C"

    def around(self, start: int, end: int) -> tuple[int, int]:
        """The range of whole blocks that contains `start` to `end`."""
        first, size = start - start % self.block_bytes, self.block_bytes
        return first, min(self.size_bytes, -(-end // size) * size)

    def holds(self, start: int, data: memoryview) -> bool:
        """Return whether `data` equals the file from `start`, the beginning of a block, to the end of another."""
        size = DIGEST_BYTES[self.is_sha256]
        first = start // self.block_bytes * size
        expected = self.blocks[first : first + -(-len(data) // self.block_bytes) * size]
        return _digests(data, self.block_bytes, with_sha256=self.is_sha256) == expected


Files = dict[str, FileSums]  # by the file's name in its checkpoint


def manifest_of(node: int) -> str:
    """Name of a node's manifest in the checkpoint's folder."""
    return f"node-{node}.json"


def block_bytes_of(size_bytes: int, ranks: int = 1) -> int:
    """Size of a file's blocks. Of a small file they are small, so that ranges waste little; a manifest stays small.

    ranks: that write a file each into the same save.
    """
    most = max(1, min(MAX_BLOCKS, MAX_SAVE_BLOCKS // ranks))
    return max(1, -(-size_bytes // (most * MIN_BLOCK_BYTES))) * MIN_BLOCK_BYTES


def sums_of_file(path: Path, *, with_sha256: bool = False, ranks: int = 1) -> FileSums:
    """Size and checksums of a file, read once, in chunks of whole blocks. `ranks`: see `block_bytes_of`."""
    crc32c, size_bytes, blocks = 0, 0, bytearray()
    with path.open("rb") as file:
        block_bytes = block_bytes_of(os.fstat(file.fileno()).st_size, ranks)
        while chunk := file.read(max(1, CHUNK_BYTES // block_bytes) * block_bytes):
            size_bytes += len(chunk)
            crc32c = google_crc32c.extend(crc32c, chunk)
            blocks += _digests(memoryview(chunk), block_bytes, with_sha256=with_sha256)
    return FileSums(size_bytes, int(crc32c), block_bytes, bytes(blocks), with_sha256)


def _digests(data: memoryview, block_bytes: int, *, with_sha256: bool) -> bytes:
    blocks = (bytes(data[start : start + block_bytes]) for start in range(0, len(data), block_bytes))
    if with_sha256:
        return b"".join(hashlib.sha256(block).digest() for block in blocks)
    return b"".join(crc32c_of(block).to_bytes(DIGEST_BYTES[False], "big") for block in blocks)


def sha256_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def signature(key: bytes, place: str, text: bytes) -> bytes:
    """Signs `text` together with its `place`, <checkpoint>/<file>, so that it is valid under no other name."""
    return hmac.new(key, place.encode() + b"\n" + text, "sha256").hexdigest().encode()


class _Entry(Part):
    """A file in a manifest. Digests are in base64, of one kind."""

    bytes: int = Field(ge=0)
    crc32c: int
    block_bytes: int = Field(ge=1)
    blocks_crc32c: str | None = None
    blocks_sha256: str | None = None

    @classmethod
    def of(cls, sums: FileSums) -> Self:
        digests = base64.b64encode(sums.blocks).decode()
        kind = "blocks_sha256" if sums.is_sha256 else "blocks_crc32c"
        return cls(bytes=sums.size_bytes, crc32c=sums.crc32c, block_bytes=sums.block_bytes, **{kind: digests})

    def sums(self) -> FileSums:
        """Return the file's sums. Raises ValueError where the digests are not base64, or missing."""
        digests = self.blocks_crc32c if self.blocks_sha256 is None else self.blocks_sha256
        if digests is None:
            raise ValueError("it has no digests of blocks")
        return FileSums(
            self.bytes, self.crc32c, self.block_bytes, base64.b64decode(digests), self.blocks_sha256 is not None
        )


_ENTRIES = TypeAdapter(dict[str, _Entry])


def manifest_bytes(files: Files, place: str, *, key: bytes = b"") -> bytes:
    """A manifest's content: JSON and, with a key, a second line with its signature."""
    entries = {name: _Entry.of(sums).model_dump(exclude_unset=True) for name, sums in files.items()}
    text = json.dumps(entries).encode()
    return b"\n".join([text, *([signature(key, place, text)] if key else [])])


def require_signed(data: bytes, place: str, key: bytes) -> None:
    """Raise ConfigError when a manifest is not signed with `key`."""
    text, *rest = data.split(b"\n")
    if not (len(rest) == 1 and hmac.compare_digest(rest[0], signature(key, place, text))):
        raise ConfigError(
            f"{place} is not signed with this run's key, so the checkpoint is not committed",
            expected="the same checkpoint.signing_key_file on every node",
            fix="give every node the same key; if they have it, someone else writes to this run's folder",
        )


def read_manifest(data: bytes, manifest: str) -> Files:
    """The files of a manifest, called `manifest` in errors.

    Raises DamagedError for a name outside the checkpoint, where not every block has a digest, and for another text.
    """
    try:
        entries = _ENTRIES.validate_json(data.split(b"\n")[0], strict=True)
        files = {name: entry.sums() for name, entry in entries.items()}
    except ValueError as error:
        raise DamagedError(f"{manifest} is not what this program writes") from error
    for name, sums in files.items():
        blocks = -(-sums.size_bytes // sums.block_bytes)
        if len(sums.blocks) != blocks * DIGEST_BYTES[sums.is_sha256]:
            raise DamagedError(f"{manifest} has not one digest for each of the {blocks:,} blocks of {name!r}")
        with contextlib.suppress(ConfigError):
            if clean_name(name) == name:
                continue
        raise DamagedError(f"{manifest} names the file {name!r}")
    return files


def signing_key(settings: CheckpointConfig) -> bytes:
    """The key that signs COMMITs; empty for none. Raises ConfigError for an unreadable or empty file."""
    if not settings.signing_key_file:
        return b""
    try:
        key = read_regular(settings.signing_key_file, LARGEST_KEY_BYTES).strip()
    except OSError as error:
        raise ConfigError(f"checkpoint.signing_key_file cannot be read: {error.strerror}") from error
    if not key:
        raise ConfigError("checkpoint.signing_key_file is empty", expected="a secret key, such as 32 random bytes")
    return key
