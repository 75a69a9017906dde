"""Copies checkpoints to a mirror: a second store to resume from, under the same commit protocol.

A copy has the original's name, files, manifests and COMMIT byte for byte, so COMMIT's signature is valid for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from vlmpipe.trainer.checkpoint.attempts import FILE as ATTEMPTS
from vlmpipe.trainer.checkpoint.attempts import read_attempts
from vlmpipe.trainer.checkpoint.commit import (
    FOLDER,
    REJECTED,
    Checkpoint,
    Listing,
    candidates,
    create_commit,
    inspect,
    list_stores,
    none_verifies,
    verified,
    verify,
    vouched_manifest,
    was_uncommitted,
)
from vlmpipe.trainer.checkpoint.manifest import DamagedError, Files, FileSums, read_manifest, sums_of_file
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.base import CorruptObjectError, ObjectInfo, Storage, join_uri
from vlmpipe.trainer.storage.file_sums import crc32c_in
from vlmpipe.trainer.storage.transfer import THREADS, in_parallel


def mirror_of(job: JobConfig) -> Storage | None:
    """The run's folder in `checkpoint.mirror_uri`; None without a mirror."""
    root = job.checkpoint.mirror_uri
    return open_storage(join_uri(root, "runs", job.run.run_id)) if root else None


def mirror_checkpoint(source: Storage, target: Storage, checkpoint: Checkpoint, *, threads: int = THREADS) -> str:
    """Copy a verified checkpoint, unless a complete copy is there. Returns the copy's URI.

    May be repeated after a kill: files of the right size and checksum are not sent again; those with a SHA-256 are read
    to compare it. A damaged copy is uncommitted, repaired and committed again. Raises CorruptObjectError when a source
    file has changed since it was verified, and the stores' errors.
    """
    folder = f"{FOLDER}/{checkpoint.name}"
    body = source.read(f"{folder}/COMMIT")
    with _corrupt_if_damaged(source):
        manifests = {name: vouched_manifest(source, checkpoint, name) for name in checkpoint.record.manifests}
    files: Files = {}
    for name, data in manifests.items():
        files |= read_manifest(data, name)
    there = {info.name.removeprefix(f"{folder}/"): info for info in target.list(folder)}

    complete = in_parallel(lambda name: _has_file(target, files[name], there.get(name)), files, threads=threads)
    missing = [name for name, is_complete in zip(files, complete, strict=True) if not is_complete]
    stale = [name for name, data in manifests.items() if name not in there or _read(target, folder, name) != data]
    is_committed = "COMMIT" in there
    if is_committed and (missing or stale or _read(target, folder, "COMMIT") != body):
        target.delete(f"{folder}/COMMIT")
        is_committed = False

    def send(name: str) -> None:
        sums = files[name]
        if sums.sha256:
            with _corrupt_if_damaged(source):
                path = verified(source, checkpoint.name, name, sums)
            target.upload(path, f"{folder}/{name}", crc32c=sums.crc32c)
        else:
            source.copy_to(f"{folder}/{name}", target, crc32c=sums.crc32c)

    for _ in in_parallel(send, missing, threads=threads):
        pass
    for name in stale:
        target.write(f"{folder}/{name}", manifests[name])
    _mirror_attempts(source, target)
    if not is_committed:
        create_commit(target, checkpoint.name, body)
    if REJECTED in there:  # a reader passed over the damaged copy
        target.delete(f"{folder}/{REJECTED}")
    inspect(target, checkpoint.name, Listing.read(target))
    return target.uri(folder)


def newest_good_of(stores: Sequence[Storage], *, key: bytes = b"") -> tuple[Storage, Checkpoint | None, list[str]]:
    """The newest checkpoint of all stores that verifies, its store (the first that has it), and why newer ones do not.

    The first store must be readable; the others only if there is no good checkpoint elsewhere. Returns (first store,
    None, []) without any checkpoint. Raises UserError (74) when none verifies: a silent fresh start would discard the
    run.
    """
    listings, unreadable = list_stores(stores)
    passed_over = [f"{stores[number].root_uri} cannot be read: {why.found}" for number, why in unreadable.items()]
    for number, name in candidates(listings):
        store = stores[number]
        try:
            return store, verify(store, name, key=key), passed_over
        except DamagedError as error:
            if was_uncommitted(store, name):
                return newest_good_of(stores, key=key)
            passed_over.append(f"in {store.root_uri}: {error}")
    for why in unreadable.values():
        raise why  # that store may hold the only good checkpoint: do not start afresh
    if passed_over:
        raise none_verifies(passed_over)
    return stores[0], None, []


@contextlib.contextmanager
def _corrupt_if_damaged(source: Storage) -> Iterator[None]:
    try:
        yield
    except DamagedError as error:
        raise CorruptObjectError(f"{source.root_uri}: {error}, which was whole a moment ago") from error


def _has_file(target: Storage, sums: FileSums, info: ObjectInfo | None) -> bool:
    if info is None or info.size_bytes != sums.bytes:
        return False
    if not sums.sha256 and (kept := crc32c_in(target, info)) is not None:
        return kept == sums.crc32c
    return sums_of_file(target.fetch(info.name), with_sha256=bool(sums.sha256)) == sums


def _read(target: Storage, folder: str, name: str) -> bytes:
    """Content of a file; nothing if it is corrupt."""
    with contextlib.suppress(CorruptObjectError):
        return target.read(f"{folder}/{name}")
    return b""


def _mirror_attempts(source: Storage, target: Storage) -> None:
    """Copy the number of starts: should the primary store be lost, the next start must outrank the mirror's files."""
    if read_attempts(target).attempt < read_attempts(source).attempt:
        target.write(ATTEMPTS, source.read(ATTEMPTS))
