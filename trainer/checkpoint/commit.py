"""The commit protocol: immutable files, one manifest per node, and a create-only COMMIT written last.

    checkpoints/<attempt>-<step>-<nonce>/<file>        written by the node that holds it
                                        /node-N.json   sizes and checksums of that node's files
                                        /COMMIT        checksums of all manifests; makes the checkpoint exist
                                        /REJECTED.json why a reader passed it over
               LATEST                                  name of the last commit, for people; no reader uses it
               ATTEMPTS.json                           see attempts.py

Readers take the newest checkpoint whose COMMIT, manifests and files all verify. Nothing is deserialized before its
checksum is confirmed, because DCP's metadata and DeepSpeed's files are pickles.
"""

from __future__ import annotations

import errno
import hmac
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from vlmpipe.trainer.checkpoint.attempts import FILE as ATTEMPTS
from vlmpipe.trainer.checkpoint.attempts import (
    FOLDER,
    attempt_of,
    attempts_of,
    claim_attempt,
    order_of,
    require_current,
)
from vlmpipe.trainer.checkpoint.fault_points import crash_point
from vlmpipe.trainer.checkpoint.manifest import (
    DamagedError,
    Files,
    FileSums,
    manifest_bytes,
    manifest_of,
    read_manifest,
    require_signed,
    sha256_of,
    signature,
    sums_of_file,
)
from vlmpipe.trainer.errors import ConfigError, ExitCode, UserError, print_warning
from vlmpipe.trainer.records.commit import CommitRecord, parse_commit
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.base import AlreadyExistsError, CorruptObjectError, Storage, crc32c_of
from vlmpipe.trainer.storage.file_sums import files_below
from vlmpipe.trainer.storage.transfer import in_parallel

PROGRAM = "trainer"  # folder of a run that has the checkpoints of a training program of the user's own
LATEST = f"{FOLDER}/LATEST"
REJECTED = "REJECTED.json"
READING = 32  # requests under way for small files, of which a save of 128 nodes has a manifest each


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint. `attempts.order_of` orders names."""

    name: str
    record: CommitRecord


def checkpoint_name(attempt: int, step: int, nonce: str) -> str:
    """Folder of one save, unique by its nonce."""
    return f"{attempt:04d}-{step:08d}-{nonce}"


def upload_node_files(store: Storage, name: str, node: int, staging: Path, *, key: bytes = b"", ranks: int = 1) -> None:
    """Upload the files of this node's ranks, then their manifest, signed if there is a key."""
    upload_files(store, name, node, files_below(staging), key=key, ranks=ranks)


def upload_files(
    store: Storage, name: str, node: int, files: Mapping[str, Path], *, key: bytes = b"", ranks: int = 1
) -> None:
    """Upload these files by their names in the checkpoint, then the node's manifest, signed if there is a key.

    ranks: of all nodes, which bounds the digests of each (`block_bytes_of`).
    """

    def upload(file: tuple[str, Path]) -> tuple[str, FileSums]:
        relative, path = file
        sums = sums_of_file(path, with_sha256=bool(key), ranks=ranks)
        # The store refuses a file that does not have this checksum on arrival.
        store.upload(path, f"{FOLDER}/{name}/{relative}", crc32c=sums.crc32c)
        crash_point("first file uploaded")
        return relative, sums

    sums = dict(in_parallel(upload, sorted(files.items())))
    crash_point("files uploaded")
    manifest = f"{name}/{manifest_of(node)}"
    store.write(f"{FOLDER}/{manifest}", manifest_bytes(sums, manifest, key=key))
    crash_point("manifest written")


def commit(
    store: Storage,
    name: str,
    record: CommitRecord,
    contents: Sequence[bytes] | None = None,
    *,
    key: bytes = b"",
) -> None:
    """Write COMMIT, which makes the checkpoint exist, after all nodes have uploaded their files.

    Three requests in a row: the manifests, the number of starts, COMMIT. contents: of the manifests, by node, as the
    store has them; None reads them.

    Raises UserError (72) when a later start of the training job has taken over, ConfigError for a manifest that is not
    signed with `key` (empty: nothing is signed).
    """
    manifests, manifests_sha256 = {}, {}
    names = [manifest_of(node) for node in range(record.num_nodes)]
    try:
        if contents is None:
            contents = list(in_parallel(lambda file: store.read(f"{FOLDER}/{name}/{file}"), names, threads=READING))
        for manifest, data in zip(names, contents, strict=True):
            manifests[manifest] = crc32c_of(data)
            if key:
                require_signed(data, f"{name}/{manifest}", key)
                manifests_sha256[manifest] = sha256_of(data)
    except UserError:
        require_current(store, record.attempt)  # the cause, if a later start has swept a manifest
        raise
    text = replace(record, manifests=manifests, manifests_sha256=manifests_sha256).text()
    signed = [signature(key, f"{name}/COMMIT", text)] if key else []
    body = b"\n".join([text, f"{crc32c_of(text):08x}".encode(), *signed])
    require_current(store, record.attempt)
    crash_point("before COMMIT")
    create_commit(store, name, body)
    crash_point("after COMMIT")


def name_newest(store: Storage, name: str, *, warn: Callable[[str], None] = print_warning) -> None:
    """Write LATEST, a hint, after COMMIT; where that fails, there is a warning. The checkpoint exists already."""
    try:
        store.write(LATEST, name.encode())
    except UserError as error:
        if not error.passes:
            raise
        warn(f"{store.uri(LATEST)} does not name {name}, which is committed: {error.found}")
    crash_point("after LATEST")


@dataclass(frozen=True)
class Listing:
    """The checkpoints' folder at one time: what is in it, and not the files of each, which are thousands."""

    folders: set[str]  # of saves, committed or not
    strangers: set[str]  # other folders, such as another program's checkpoints
    commits: dict[str, bytes]  # content of COMMIT by name; empty where it cannot be read whole
    rejected: set[str]  # names that a reader has passed over
    fresh_from: int  # attempts before this one were given up

    @classmethod
    def read(cls, store: Storage) -> Listing:
        every = store.folders(FOLDER)
        saves = [name for name in every if attempt_of(name) >= 0]
        files = [ATTEMPTS, *(f"{FOLDER}/{name}/{file}" for file in ("COMMIT", REJECTED) for name in saves)]
        attempts, *contents = in_parallel(partial(_content, store), files, threads=READING)
        commits, notes = contents[: len(saves)], contents[len(saves) :]
        return cls(
            folders=set(saves),
            strangers={name for name in every if name not in saves and store.list(f"{FOLDER}/{name}")},
            commits={name: content for name, content in zip(saves, commits, strict=True) if content is not None},
            rejected={name for name, note in zip(saves, notes, strict=True) if note is not None},
            fresh_from=attempts_of(store, attempts).fresh_from,
        )

    @property
    def committed(self) -> list[str]:
        """Names with a COMMIT, oldest first, without those given up by resume=never."""
        return sorted((name for name in self.commits if attempt_of(name) >= self.fresh_from), key=order_of)

    def record(self, name: str, *, key: bytes = b"") -> CommitRecord:
        """The record in a checkpoint's COMMIT. Raises as `read_commit`."""
        if name not in self.commits:
            raise DamagedError(f"{name}: COMMIT is missing")
        return _record_of(self.commits[name], name, key)


def _content(store: Storage, file: str) -> bytes | None:
    """Content of a small file; None without one, and empty if it is damaged in the store."""
    if file.endswith(REJECTED):  # it matters only that it is there
        return b"" if store.stat(file) else None
    try:
        return read_or_none(store, file)
    except UserError as error:
        if _is_damage(error):
            return b""
        raise


def read_or_none(store: Storage, file: str) -> bytes | None:
    """Content of a small file; None without one. Takes one request where it is there."""
    try:
        return store.read(file)
    except UserError:
        if store.stat(file) is None:
            return None
    return store.read(file)  # written since: by a mirror, or by a node


def create_commit(store: Storage, name: str, body: bytes) -> None:
    """Create COMMIT, unless it already has these bytes: from a write whose answer was lost, or another mirror."""
    try:
        store.create(f"{FOLDER}/{name}/COMMIT", body)
    except AlreadyExistsError:
        if store.read(f"{FOLDER}/{name}/COMMIT") != body:
            raise


def committed(store: Storage) -> list[str]:
    """Names of the checkpoints that may be resumed, oldest first."""
    return Listing.read(store).committed


def settle_other_trainer(uri: str, whose: str, *, fresh: bool, submission: str) -> None:
    """Give up the checkpoints in `uri`, of the run's other kind of trainer, if `fresh`.

    Raises ConfigError else, where there are any: this start would begin from step 0 next to them.
    """
    other = open_storage(uri)
    saved = committed(other)
    if saved and fresh:
        claim_attempt(other, fresh=True, submission=submission)
    elif saved:
        raise ConfigError(
            f"this run has checkpoints of {whose} (such as {saved[-1]}), which the trainer of this run file cannot "
            "continue",
            expected="train.trainer as it was when the run was started",
            fix="restore it, or start a new run (train.resume=never, or another run id)",
        )


def list_stores(stores: Sequence[Storage]) -> tuple[dict[int, Listing], dict[int, UserError]]:
    """Listings and errors of the stores, by number. Raises the error of the first one, which must be readable."""
    listings: dict[int, Listing] = {}
    errors: dict[int, UserError] = {}
    for number, store in enumerate(stores):
        try:
            listings[number] = Listing.read(store)
        except UserError as error:
            if number == 0:
                raise
            errors[number] = error
    return listings, errors


def candidates(listings: Mapping[int, Listing]) -> list[tuple[int, str]]:
    """Number of the store and name of each checkpoint that may be resumed, newest first.

    A checkpoint in several stores comes first from the store with the lowest number. Starts that any store records as
    given up (resume=never) do not count.
    """
    fresh_from = max(listing.fresh_from for listing in listings.values())
    numbered = [(number, name) for number, listing in listings.items() for name in listing.committed]
    numbered = [(number, name) for number, name in numbered if attempt_of(name) >= fresh_from]
    return sorted(numbered, key=lambda candidate: (order_of(candidate[1]), -candidate[0]), reverse=True)


def opened(store: Storage, name: str, listing: Listing, *, key: bytes = b"") -> tuple[Checkpoint, Files]:
    """The checkpoint and its files, from COMMIT and the manifests. Who reads a file finds out whether it is whole.

    Raises DamagedError for a COMMIT or manifest that is damaged.
    """
    checkpoint = Checkpoint(name, listing.record(name, key=key))
    return checkpoint, files_of(store, checkpoint)


def inspect(store: Storage, name: str, listing: Listing, *, key: bytes = b"") -> tuple[Checkpoint, Files]:
    """Check COMMIT, the manifests, and every file's presence and size, without reading files.

    Returns the checkpoint and its files. Raises DamagedError with the first fault.
    """
    checkpoint, files = opened(store, name, listing, key=key)
    folder = f"{FOLDER}/{name}"
    sizes_bytes = {info.name.removeprefix(f"{folder}/"): info.size_bytes for info in store.list(folder)}
    for file, sums in files.items():
        size_bytes = sizes_bytes.get(file)
        if size_bytes is None:
            raise DamagedError(f"{name}: {file} is missing")
        if size_bytes != sums.size_bytes:
            raise DamagedError(f"{name}: {file} has {size_bytes} bytes, its manifest says {sums.size_bytes}")
    return checkpoint, files


def was_uncommitted(store: Storage, name: str) -> bool:
    """Return whether a listed checkpoint lost its COMMIT to retention while it was read: it is not damaged, only
    deleted.
    """
    return store.stat(f"{FOLDER}/{name}/COMMIT") is None


def none_verifies(passed_over: Sequence[str]) -> UserError:
    """The error of a run whose checkpoints are all damaged."""
    return UserError(
        "no checkpoint of this run verifies: " + "; ".join(passed_over),
        expected="at least one whole checkpoint",
        fix="restore the files (nothing was deleted), or start a new run (--fresh, on Vertex AI another run_id)",
        code=ExitCode.CHECKPOINT_CORRUPT,
    )


def vouched_manifests(store: Storage, checkpoint: Checkpoint) -> dict[str, bytes]:
    """Content of the manifests that COMMIT lists. Raises DamagedError when one has changed."""
    record, manifests = checkpoint.record, {}

    def read(manifest: str) -> bytes:
        return _read(store, checkpoint.name, manifest)

    contents = in_parallel(read, record.manifests, threads=READING)
    for (manifest, crc32c), data in zip(record.manifests.items(), contents, strict=True):
        is_signed_for = not record.manifests_sha256 or sha256_of(data) == record.manifests_sha256.get(manifest)
        if crc32c_of(data) != crc32c or not is_signed_for:
            raise DamagedError(f"{checkpoint.name}: {manifest} has changed since COMMIT")
        manifests[manifest] = data
    return manifests


def files_of(store: Storage, checkpoint: Checkpoint) -> Files:
    """All files of a checkpoint, from its manifests. Raises DamagedError when a manifest has changed."""
    files: Files = {}
    for manifest, data in vouched_manifests(store, checkpoint).items():
        files |= read_manifest(data, f"{checkpoint.name}: {manifest}")
    return files


def reject(store: Storage, name: str, reason: str) -> None:
    """Mark a checkpoint as passed over. Nothing is deleted."""
    store.write(f"{FOLDER}/{name}/{REJECTED}", json.dumps({"reason": reason}).encode())


def read_commit(store: Storage, name: str, *, key: bytes = b"") -> CommitRecord:
    """The content of COMMIT. Raises DamagedError when it is damaged, ConfigError for that of another version."""
    return _record_of(_read(store, name, "COMMIT"), name, key)


def _record_of(content: bytes, name: str, key: bytes) -> CommitRecord:
    text, *rest = content.split(b"\n")
    if not rest or rest[0] != f"{crc32c_of(text):08x}".encode():
        raise DamagedError(f"{name}: COMMIT differs from its CRC32C")
    if key and not (len(rest) == 2 and hmac.compare_digest(rest[1], signature(key, f"{name}/COMMIT", text))):
        raise DamagedError(f"{name}: COMMIT is not signed with this run's key")
    try:
        return parse_commit(text, name)
    except ValueError as error:
        raise DamagedError(f"{name}: COMMIT is not what this program writes") from error


def _read(store: Storage, name: str, file: str) -> bytes:
    try:
        return store.read(f"{FOLDER}/{name}/{file}")
    except UserError as error:
        raise damage_of(store, name, file, error) from error


def _is_damage(error: UserError) -> bool:
    """Return whether the bytes are at fault that the store or the disk has."""
    return isinstance(error, CorruptObjectError) or getattr(error.__cause__, "errno", None) == errno.EIO


def damage_of(store: Storage, name: str, file: str, error: UserError) -> Exception:
    """A DamagedError when the file itself is at fault; else, as for an unreachable store, the error."""
    if _is_damage(error):
        return DamagedError(f"{name}: {file}: {error.found}")
    if store.stat(f"{FOLDER}/{name}/{file}") is None:
        return DamagedError(f"{name}: {file} is missing")
    return error
