"""A node's manifest of its uploaded files: sizes and checksums, signed if the run has a key.

CRC32C detects accidents cheaply, but can be forged. With a key, files also have a SHA-256, and manifests and COMMIT are
signed by HMAC-SHA256 over their content and name.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import google_crc32c

from vlmpipe.trainer.config.checkpoint import CheckpointConfig
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.storage.base import CHUNK_BYTES, clean_name
from vlmpipe.trainer.storage.regular_files import read_regular

LARGEST_KEY_BYTES = 1 << 20


class DamagedError(Exception):
    """Why a checkpoint must not be loaded."""


@dataclass(frozen=True)
class FileSums:
    """Size and checksums of a file. `sha256` is hexadecimal, "" without a key."""

    bytes: int
    crc32c: int
    sha256: str = ""


Files = dict[str, FileSums]  # by the file's name in its checkpoint


def manifest_of(node: int) -> str:
    """Name of a node's manifest in the checkpoint's folder."""
    return f"node-{node}.json"


def sums_of_file(path: Path, *, with_sha256: bool = False) -> FileSums:
    """Size and checksums of a file, read once, in chunks."""
    size_bytes, crc32c, sha256 = 0, 0, hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            size_bytes += len(chunk)
            crc32c = google_crc32c.extend(crc32c, chunk)
            if with_sha256:
                sha256.update(chunk)
    return FileSums(size_bytes, int(crc32c), sha256.hexdigest() if with_sha256 else "")


def sha256_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def signature(key: bytes, place: str, text: bytes) -> bytes:
    """Signs `text` together with its `place`, <checkpoint>/<file>, so that it is valid under no other name."""
    return hmac.new(key, place.encode() + b"\n" + text, "sha256").hexdigest().encode()


def manifest_bytes(files: Files, place: str, *, key: bytes = b"") -> bytes:
    """A manifest's content: JSON and, with a key, a second line with its signature."""
    entries = {name: {k: v for k, v in asdict(sums).items() if v != ""} for name, sums in files.items()}
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
    """The files of a manifest, called `manifest` in errors. Raises DamagedError for a name outside the checkpoint."""
    files = {name: FileSums(**entry) for name, entry in json.loads(data.split(b"\n")[0]).items()}
    for name in files:
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
