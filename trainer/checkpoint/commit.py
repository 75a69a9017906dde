"""The commit protocol: immutable files, one manifest per node, and a create-only COMMIT written last.

    checkpoints/<epoch>-<step>-<nonce>/<file>        written by the node that holds it
                                      /node-N.json   sizes and CRC32C of that node's files
                                      /COMMIT        checksums of all manifests and its own; without it nothing exists

A reader takes the newest checkpoint whose COMMIT, manifests and files all verify, and falls back to the one before if
they do not. Nothing is deserialised before its checksum is confirmed, because DCP's metadata and DeepSpeed's files are
pickles.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trainer.errors import ExitCode, UserError
from trainer.storage import AlreadyExistsError, Storage, crc32c_of, crc32c_of_file

FORMAT_VERSION = 1
FOLDER = "checkpoints"


@dataclass(frozen=True)
class CommitRecord:
    """What a checkpoint says of itself. Rows are counted over all ranks since the start of training."""

    epoch: int
    step: int
    rows_consumed: int
    world_size: int
    num_nodes: int
    strategy: str
    checkpoint_format: str  # dcp | deepspeed
    plan_sha256: str
    model_sha256: str  # of the model section of the run file
    tower_sha256: str  # of the frozen tower's weights, "" when it is trained
    versions: dict[str, str]
    manifests: dict[str, int] = field(default_factory=dict)  # file name -> CRC32C
    format_version: int = FORMAT_VERSION


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint. `name` sorts by epoch, then step."""

    name: str
    record: CommitRecord


def checkpoint_name(epoch: int, step: int, nonce: str) -> str:
    """Folder of a save attempt; the nonce keeps a repeated attempt at the same step apart."""
    return f"{epoch:04d}-{step:08d}-{nonce}"


def upload_node_files(store: Storage, name: str, node: int, staging: Path) -> None:
    """Upload what this node's ranks wrote, then the manifest that vouches for it."""
    entries = {}
    for file in sorted(path for path in staging.rglob("*") if path.is_file()):
        relative = file.relative_to(staging).as_posix()
        entries[relative] = {"bytes": file.stat().st_size, "crc32c": crc32c_of_file(file)}
        store.upload(file, f"{FOLDER}/{name}/{relative}")
    store.write(f"{FOLDER}/{name}/node-{node}.json", json.dumps(entries).encode())


def commit(store: Storage, name: str, record: CommitRecord) -> None:
    """Make the checkpoint exist. All nodes must have uploaded their files."""
    manifests = {}
    for node in range(record.num_nodes):
        manifest = f"node-{node}.json"
        manifests[manifest] = crc32c_of(store.read(f"{FOLDER}/{name}/{manifest}"))
    text = json.dumps({**asdict(record), "manifests": manifests}).encode()
    body = text + f"\n{crc32c_of(text):08x}".encode()
    try:
        store.create(f"{FOLDER}/{name}/COMMIT", body)
    except AlreadyExistsError:
        # The name holds our nonce: only an earlier try of this write, whose answer was lost, can have made it.
        if store.read(f"{FOLDER}/{name}/COMMIT") != body:
            raise


def committed(store: Storage) -> list[str]:
    """Names of the checkpoints that have a COMMIT, oldest first."""
    suffix = "/COMMIT"
    names = [info.name for info in store.list(FOLDER) if info.name.endswith(suffix)]
    return sorted(name.removeprefix(f"{FOLDER}/").removesuffix(suffix) for name in names)


def verify(store: Storage, name: str) -> Checkpoint:
    """Check COMMIT, manifests and every file's size and CRC32C. Raises DamagedError with the first fault."""
    record = _read_commit(store, name)
    for manifest, checksum in record.manifests.items():
        if store.stat(f"{FOLDER}/{name}/{manifest}") is None:
            raise DamagedError(f"{name}: {manifest} is missing")
        data = store.read(f"{FOLDER}/{name}/{manifest}")
        if crc32c_of(data) != checksum:
            raise DamagedError(f"{name}: {manifest} has changed since COMMIT")
        for file, expected in json.loads(data).items():
            _verify_file(store, name, file, expected)
    return Checkpoint(name, record)


def newest_good(store: Storage) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that verifies, and why each newer one was passed over.

    Returns (None, []) when nothing was ever committed. Raises UserError (exit 74) when checkpoints exist but none
    verifies: starting afresh in silence would throw a run away.
    """
    passed_over: list[str] = []
    for name in reversed(committed(store)):
        try:
            return verify(store, name), passed_over
        except DamagedError as error:
            passed_over.append(str(error))
    if passed_over:
        raise UserError(
            "no checkpoint of this run verifies: " + "; ".join(passed_over),
            expected="at least one whole checkpoint",
            fix="restore the files (nothing was deleted), or start a new run (--fresh, on Vertex AI another run_id)",
            code=ExitCode.CHECKPOINT_CORRUPT,
        )
    return None, []


def fetch_folder(store: Storage, checkpoint: Checkpoint, scratch: Path) -> Path:
    """A local folder with all files of a verified checkpoint, in their layout."""
    files = [file for manifest in checkpoint.record.manifests for file in _manifest(store, checkpoint.name, manifest)]
    folder = scratch / checkpoint.name
    for file in files:
        target = folder / file
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(store.fetch(f"{FOLDER}/{checkpoint.name}/{file}").resolve())
    return folder


def delete_old(store: Storage, keep: int, *, newest: str) -> list[str]:
    """Delete all checkpoints but `newest` and the `keep - 1` before it.

    Those after it are of a future that did not happen: they were passed over as damaged, or training was started anew.
    COMMIT goes first: a half-deleted checkpoint must not look whole.
    """
    names = committed(store)
    end = names.index(newest) + 1
    old = [name for name in names if name not in names[max(0, end - keep) : end]]
    for name in old:
        store.delete(f"{FOLDER}/{name}/COMMIT")
        for info in store.list(f"{FOLDER}/{name}"):
            store.delete(info.name)
    return old


class DamagedError(Exception):
    """A checkpoint that must not be loaded, and why."""


def _read_commit(store: Storage, name: str) -> CommitRecord:
    text, _, checksum = store.read(f"{FOLDER}/{name}/COMMIT").rpartition(b"\n")
    if checksum != f"{crc32c_of(text):08x}".encode():
        raise DamagedError(f"{name}: COMMIT differs from its CRC32C")
    content = json.loads(text)
    if content["format_version"] != FORMAT_VERSION:
        raise DamagedError(f"{name}: format version {content['format_version']}, this program reads {FORMAT_VERSION}")
    return CommitRecord(**content)


def _manifest(store: Storage, name: str, manifest: str) -> Iterable[str]:
    return json.loads(store.read(f"{FOLDER}/{name}/{manifest}"))


def _verify_file(store: Storage, name: str, file: str, expected: dict[str, Any]) -> None:
    info = store.stat(f"{FOLDER}/{name}/{file}")
    if info is None:
        raise DamagedError(f"{name}: {file} is missing")
    if info.size_bytes != expected["bytes"]:
        raise DamagedError(f"{name}: {file} has {info.size_bytes} bytes, its manifest says {expected['bytes']}")
    if crc32c_of_file(store.fetch(f"{FOLDER}/{name}/{file}")) != expected["crc32c"]:
        raise DamagedError(f"{name}: {file} differs from its CRC32C")
