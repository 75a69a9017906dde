"""Copies checkpoints to a mirror: a second store to resume from, under the same commit protocol.

A copy has the original's name, files, manifests and COMMIT byte for byte, so COMMIT's signature is valid for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

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
    vouched_manifests,
    was_uncommitted,
)
from vlmpipe.trainer.checkpoint.manifest import DamagedError, Files, FileSums, read_manifest
from vlmpipe.trainer.checkpoint.verified_files import CheckpointFiles, verify
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.base import CorruptObjectError, ObjectInfo, Storage, join_uri
from vlmpipe.trainer.storage.file_sums import crc32c_in
from vlmpipe.trainer.storage.transfer import THREADS, in_parallel

Result = TypeVar("Result")


def mirror_of(job: JobConfig, *below: str) -> Storage | None:
    """The run's folder in `checkpoint.mirror_uri`, or one `below` it; None without a mirror."""
    root = job.checkpoint.mirror_uri
    return open_storage(join_uri(root, "runs", job.run.run_id, *below)) if root else None


def mirror_checkpoint(source: Storage, target: Storage, checkpoint: Checkpoint, *, threads: int = THREADS) -> str:
    """Copy a verified checkpoint, unless a complete copy is there. Returns the copy's URI.

    May be repeated after a kill: files of the right size and checksum are not sent again; those with a SHA-256 are read
    to compare it. A damaged copy is uncommitted, repaired and committed again. Raises CorruptObjectError when a source
    file has changed since it was verified, and the stores' errors.
    """
    folder = f"{FOLDER}/{checkpoint.name}"
    body = source.read(f"{folder}/COMMIT")
    with _corrupt_if_damaged(source):
        manifests = vouched_manifests(source, checkpoint)
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
        source.copy_to(f"{folder}/{name}", target, crc32c=files[name].crc32c)
        if files[name].is_sha256 and not _is_whole(target, checkpoint.name, name, files[name]):
            target.delete(f"{folder}/{name}")
            raise CorruptObjectError(f"{source.root_uri}: {checkpoint.name}: {name} differs from its SHA-256")

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
    """The newest checkpoint of all stores of which every byte verifies, its store, and why newer ones do not.

    Returns (first store, None, []) without any checkpoint. Raises as `newest_usable_of`.
    """
    passed_over: list[str] = []

    def whole(store: Storage, name: str, _: Listing) -> tuple[Storage, Checkpoint]:
        return store, verify(store, name, key=key)

    newest = newest_usable_of(stores, whole, passed_over)
    return (*newest, passed_over) if newest else (stores[0], None, [])


def newest_usable_of(
    stores: Sequence[Storage],
    use: Callable[[Storage, str, Listing], Result],
    passed_over: list[str],
    *,
    first: Callable[[Storage, str], str] = lambda store, name: name,
) -> Result | None:
    """The result of `use` for the newest checkpoint of all stores that it does not find damaged; None without any.

    The store is the first that has it. The first store must be readable; the others only if there is no good checkpoint
    elsewhere. Raises UserError (74) when all are damaged: a silent fresh start would discard the run.

    Args:
        use: raises DamagedError.
        passed_over: receives why newer checkpoints are not used, before `use` is called.
        first: gives the name of the checkpoint to try before the newest, from the newest one's store and name.
    """
    listings, unreadable = list_stores(stores)
    passed_over[:] = [f"{stores[number].root_uri} cannot be read: {why.found}" for number, why in unreadable.items()]
    names = candidates(listings)
    if names:
        asked = first(stores[names[0][0]], names[0][1])
        names = sorted(names, key=lambda candidate: candidate[1] != asked)  # stable: the others newest first
        if asked != names[0][1]:
            passed_over.append(f"{asked} is not there")
    for number, name in names:
        store = stores[number]
        try:
            return use(store, name, listings[number])
        except DamagedError as error:
            if was_uncommitted(store, name):
                return newest_usable_of(stores, use, passed_over, first=first)
            passed_over.append(f"in {store.root_uri}: {error}")
    for why in unreadable.values():
        raise why  # that store may hold the only good checkpoint: do not start afresh
    if passed_over:
        raise none_verifies(passed_over)
    return None


@contextlib.contextmanager
def _corrupt_if_damaged(source: Storage) -> Iterator[None]:
    try:
        yield
    except DamagedError as error:
        raise CorruptObjectError(f"{source.root_uri}: {error}, which was whole a moment ago") from error


def _has_file(target: Storage, sums: FileSums, info: ObjectInfo | None) -> bool:
    if info is None or info.size_bytes != sums.size_bytes:
        return False
    if not sums.is_sha256 and (stored_crc := crc32c_in(target, info)) is not None:
        return stored_crc == sums.crc32c
    of_checkpoint, _, file = info.name.removeprefix(f"{FOLDER}/").partition("/")
    return _is_whole(target, of_checkpoint, file, sums)


def _is_whole(store: Storage, checkpoint: str, file: str, sums: FileSums) -> bool:
    files = CheckpointFiles(store, checkpoint, {file: sums})
    try:
        files.verify(files.whole())
    except DamagedError:
        return False
    return True


def _read(target: Storage, folder: str, name: str) -> bytes:
    """Content of a file; nothing if it is corrupt."""
    with contextlib.suppress(CorruptObjectError):
        return target.read(f"{folder}/{name}")
    return b""


def _mirror_attempts(source: Storage, target: Storage) -> None:
    """Copy the number of starts: should the primary store be lost, the next start must outrank the mirror's files."""
    if read_attempts(target).attempt < read_attempts(source).attempt:
        target.write(ATTEMPTS, source.read(ATTEMPTS))
