"""The commit protocol: immutable files, one manifest per node, and a create-only COMMIT written last.

    checkpoints/<attempt>-<step>-<nonce>/<file>        written by the node that holds it
                                        /node-N.json   sizes and CRC32C of that node's files
                                        /COMMIT        checksums of all manifests and its own; without it nothing exists
                                        /REJECTED.json why a reader passed it over
               LATEST                                  name of the last one committed, for people; no reader trusts it
               ATTEMPTS.json                           see attempts.py

A reader takes the newest checkpoint whose COMMIT, manifests and files all verify, and falls back to the one before if
they do not. Nothing is deserialised before its checksum is confirmed, because DCP's metadata and DeepSpeed's files are
pickles.
"""

from __future__ import annotations

import errno
import hmac
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from trainer.checkpoint.attempts import attempt_of, read_attempts, require_current
from trainer.checkpoint.crash_points import crash_point
from trainer.errors import ConfigError, ExitCode, UserError, os_errors
from trainer.storage import AlreadyExistsError, CorruptObjectError, Storage, crc32c_of, crc32c_of_file
from trainer.transfer import in_parallel

FORMAT_VERSION = 2
FOLDER = "checkpoints"
LATEST = f"{FOLDER}/LATEST"
REJECTED = "REJECTED.json"

Files = dict[str, int]  # file -> CRC32C


@dataclass(frozen=True)
class CommitRecord:
    """What a checkpoint says of itself. Rows are counted over all ranks since the start of training."""

    attempt: int  # start of the training job that saved it
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
    loss: float | None = None  # of the last step
    manifests: Files = field(default_factory=dict)
    format_version: int = FORMAT_VERSION


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint. `name` sorts by attempt, then step."""

    name: str
    record: CommitRecord


def checkpoint_name(attempt: int, step: int, nonce: str) -> str:
    """Folder of one save; the nonce keeps it apart from every other."""
    return f"{attempt:04d}-{step:08d}-{nonce}"


def upload_node_files(store: Storage, name: str, node: int, staging: Path) -> None:
    """Upload what this node's ranks wrote, then the manifest that vouches for it."""

    def upload(file: Path) -> tuple[str, dict[str, int]]:
        relative = file.relative_to(staging).as_posix()
        entry = {"bytes": file.stat().st_size, "crc32c": crc32c_of_file(file)}
        # The checksum goes with the file: one that changes on its way from here is refused, and nothing is committed.
        store.upload(file, f"{FOLDER}/{name}/{relative}", crc32c=entry["crc32c"])
        crash_point("first file uploaded")
        return relative, entry

    entries = dict(in_parallel(upload, sorted(path for path in staging.rglob("*") if path.is_file())))
    crash_point("files uploaded")
    store.write(f"{FOLDER}/{name}/{manifest_of(node)}", json.dumps(entries).encode())
    crash_point("manifest written")


def manifest_of(node: int) -> str:
    """Name of a node's manifest in the checkpoint's folder."""
    return f"node-{node}.json"


def commit(store: Storage, name: str, record: CommitRecord, *, key: bytes = b"") -> None:
    """Make the checkpoint exist. All nodes must have uploaded their files.

    Args:
        key: secret that signs COMMIT (HMAC-SHA256); empty for none.

    Raises UserError (72) when a later start of the training job has taken over.
    """
    manifests = {}
    for node in range(record.num_nodes):
        manifest = manifest_of(node)
        try:
            manifests[manifest] = crc32c_of(store.read(f"{FOLDER}/{name}/{manifest}"))
        except UserError:
            require_current(store, record.attempt)  # a later start has swept it: that is the cause to name
            raise
    text = json.dumps({**asdict(record), "manifests": manifests}).encode()
    body = b"\n".join([text, f"{crc32c_of(text):08x}".encode(), *([_signature(text, key)] if key else [])])
    require_current(store, record.attempt)
    crash_point("before COMMIT")
    try:
        store.create(f"{FOLDER}/{name}/COMMIT", body)
    except AlreadyExistsError:
        # The name holds our nonce: only an earlier try of this write, whose answer was lost, can have made it.
        if store.read(f"{FOLDER}/{name}/COMMIT") != body:
            raise
    crash_point("after COMMIT")
    store.write(LATEST, name.encode())
    crash_point("after LATEST")


def committed(store: Storage) -> list[str]:
    """Names of the checkpoints that have a COMMIT and may be resumed, oldest first."""
    return Listing.read(store).committed


@dataclass(frozen=True)
class Listing:
    """One look at the checkpoints' folder."""

    sizes_bytes: dict[str, int]  # object name under checkpoints/ -> size
    fresh_from: int  # attempts before this one were given up

    @classmethod
    def read(cls, store: Storage) -> Listing:
        """One list of the folder, however many files there are."""
        sizes = {info.name.removeprefix(f"{FOLDER}/"): info.size_bytes for info in store.list(FOLDER)}
        return cls(sizes, read_attempts(store).fresh_from)

    @property
    def committed(self) -> list[str]:
        """Names with a COMMIT, oldest first, without those that were given up."""
        names = [name.removesuffix("/COMMIT") for name in self.sizes_bytes if name.endswith("/COMMIT")]
        return sorted(name for name in names if attempt_of(name) >= self.fresh_from)

    @property
    def rejected(self) -> set[str]:
        """Names that a reader has passed over."""
        suffix = f"/{REJECTED}"
        return {name.removesuffix(suffix) for name in self.sizes_bytes if name.endswith(suffix)}

    @property
    def folders(self) -> set[str]:
        """Every folder that a save has made, committed or not."""
        return {name.partition("/")[0] for name in self.sizes_bytes if attempt_of(name.partition("/")[0]) >= 0}


def inspect(store: Storage, name: str, listing: Listing, *, key: bytes = b"") -> tuple[Checkpoint, Files]:
    """Check COMMIT, its signature, the manifests and that every file is there in its size. Reads no file.

    Returns the checkpoint and its files' CRC32C. Raises DamagedError with the first fault.
    """
    record = read_record(store, name, key=key)
    checksums: Files = {}
    for manifest, checksum in record.manifests.items():
        data = _read(store, name, manifest)
        if crc32c_of(data) != checksum:
            raise DamagedError(f"{name}: {manifest} has changed since COMMIT")
        for file, expected in json.loads(data).items():
            size_bytes = listing.sizes_bytes.get(f"{name}/{file}")
            if size_bytes is None:
                raise DamagedError(f"{name}: {file} is missing")
            if size_bytes != expected["bytes"]:
                raise DamagedError(f"{name}: {file} has {size_bytes} bytes, its manifest says {expected['bytes']}")
            checksums[file] = expected["crc32c"]
    return Checkpoint(name, record), checksums


def verify(store: Storage, name: str, *, key: bytes = b"") -> Checkpoint:
    """Check COMMIT, manifests and every file's size and CRC32C. Raises DamagedError with the first fault."""
    checkpoint, checksums = inspect(store, name, Listing.read(store), key=key)
    for file in checksums:
        _verified(store, name, file, checksums[file])
    return checkpoint


def newest_good(store: Storage, *, key: bytes = b"") -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that verifies, and why each newer one was passed over.

    Returns (None, []) when nothing was ever committed. Raises UserError (exit 74) when checkpoints exist but none
    verifies: starting afresh in silence would throw a run away.
    """
    passed_over: list[str] = []
    for name in reversed(committed(store)):
        try:
            return verify(store, name, key=key), passed_over
        except DamagedError as error:
            if was_uncommitted(store, name):
                return newest_good(store, key=key)
            passed_over.append(str(error))
    if passed_over:
        raise none_verifies(passed_over)
    return None, []


def was_uncommitted(store: Storage, name: str) -> bool:
    """Whether a committed checkpoint has no COMMIT any more: clearing up went by while it was read.

    Then it was not damaged, and there is a newer one than the reader's listing had.
    """
    return store.stat(f"{FOLDER}/{name}/COMMIT") is None


def none_verifies(passed_over: Sequence[str]) -> UserError:
    """The error of a run that has checkpoints, none of them whole."""
    return UserError(
        "no checkpoint of this run verifies: " + "; ".join(passed_over),
        expected="at least one whole checkpoint",
        fix="restore the files (nothing was deleted), or start a new run (--fresh, on Vertex AI another run_id)",
        code=ExitCode.CHECKPOINT_CORRUPT,
    )


def fetch_folder(store: Storage, checkpoint: Checkpoint, scratch: Path) -> Path:
    """A local folder with all files of a checkpoint, in their layout, each compared with its CRC32C on the way.

    Raises DamagedError for a file that differs: then nothing of the folder may be read.
    """
    _, checksums = inspect_committed(store, checkpoint)
    folder = scratch / checkpoint.name
    for file, checksum in checksums.items():
        target = folder / file
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(_verified(store, checkpoint.name, file, checksum))
    return folder


def inspect_committed(store: Storage, checkpoint: Checkpoint) -> tuple[Checkpoint, Files]:
    """The files of a checkpoint whose COMMIT was read before, by the manifests that this COMMIT vouches for."""
    checksums: Files = {}
    for manifest, checksum in checkpoint.record.manifests.items():
        data = _read(store, checkpoint.name, manifest)
        if crc32c_of(data) != checksum:
            raise DamagedError(f"{checkpoint.name}: {manifest} has changed since COMMIT")
        checksums |= {file: expected["crc32c"] for file, expected in json.loads(data).items()}
    return checkpoint, checksums


def reject(store: Storage, name: str, reason: str) -> None:
    """Leave a note beside a checkpoint that was passed over. Nothing of it is deleted."""
    store.write(f"{FOLDER}/{name}/{REJECTED}", json.dumps({"reason": reason}).encode())


class DamagedError(Exception):
    """A checkpoint that must not be loaded, and why."""


def read_record(store: Storage, name: str, *, key: bytes = b"") -> CommitRecord:
    """What COMMIT says. Raises DamagedError when it cannot be believed, ConfigError for another format version."""
    text, *rest = _read(store, name, "COMMIT").split(b"\n")
    if not rest or rest[0] != f"{crc32c_of(text):08x}".encode():
        raise DamagedError(f"{name}: COMMIT differs from its CRC32C")
    if key and not (len(rest) == 2 and hmac.compare_digest(rest[1], _signature(text, key))):
        raise DamagedError(f"{name}: COMMIT is not signed with this run's key")
    try:
        content = json.loads(text)
        version = content["format_version"]
        if version == FORMAT_VERSION:
            return CommitRecord(**content)
    except (ValueError, TypeError, KeyError) as error:
        raise DamagedError(f"{name}: COMMIT is not what this program writes") from error
    # Whole, and not ours to judge: passing it over would let a later save clear it away.
    raise ConfigError(
        f"checkpoint {name} has format version {version}, this program reads {FORMAT_VERSION}",
        expected="checkpoints of this version of vlmpipe",
        fix="continue the run with the version that saved it, or start a new run",
    )


def _signature(text: bytes, key: bytes) -> bytes:
    return hmac.new(key, text, "sha256").hexdigest().encode()


def _read(store: Storage, name: str, file: str) -> bytes:
    try:
        return store.read(f"{FOLDER}/{name}/{file}")
    except UserError as error:
        raise _damage(store, name, file, error) from error


def _verified(store: Storage, name: str, file: str, checksum: int) -> Path:
    try:
        path = store.fetch(f"{FOLDER}/{name}/{file}").resolve()
        with os_errors(f"reading {path}"):
            found = crc32c_of_file(path)
    except UserError as error:
        raise _damage(store, name, file, error) from error
    if found != checksum:
        raise DamagedError(f"{name}: {file} differs from its CRC32C")
    return path


def _damage(store: Storage, name: str, file: str, error: UserError) -> Exception:
    """A DamagedError when the file itself is at fault, else the error: a store out of reach damages nothing."""
    if isinstance(error, CorruptObjectError) or (
        isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EIO
    ):
        return DamagedError(f"{name}: {file}: {error.found}")
    if store.stat(f"{FOLDER}/{name}/{file}") is None:
        return DamagedError(f"{name}: {file} is missing")
    return error
