"""Moving a checkpoint: up, down and to a second place, beside plain copies and the client library's own manager.

The store is the strict stand-in on this machine: these figures show what each side costs, and nothing about a network.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from google.cloud import storage
from google.cloud.storage import transfer_manager

from benchmarks.bucket_server import BUCKET, bucket_server
from benchmarks.common import interleaved
from benchmarks.report import Report, Side
from trainer.checkpoint.attempts import claim_attempt
from trainer.checkpoint.commit import (
    FOLDER,
    CommitRecord,
    checkpoint_name,
    commit,
    fetch_folder,
    upload_node_files,
    verify,
)
from trainer.checkpoint.mirror import mirror_checkpoint
from trainer.storage.base import CHUNK_BYTES, Storage
from trainer.storage.gcs import GcsStorage
from trainer.storage.local import LocalStorage
from trainer.storage.transfer import THREADS

MIB = 2**20
FILES = 8
RECORD = CommitRecord(
    attempt=1,
    epoch=0,
    step=0,
    sequences_consumed=0,
    world_size=1,
    num_nodes=1,
    strategy="ddp",
    checkpoint_format="dcp",
    plan_sha256="",
    model_sha256="",
    tower_sha256="",
    versions={},
)


def moving(report: Report, folder: Path, rounds: int, *, megabytes: int) -> None:
    """All comparisons, over the same files."""
    source = folder / "source"
    source.mkdir(parents=True)
    for number in range(FILES):
        (source / f"shard-{number}").write_bytes(os.urandom(megabytes * MIB // FILES))
    data = f"{FILES} files, {megabytes} MiB"
    to_folder(report, folder, source, rounds, data, megabytes)
    with bucket_server() as client:
        to_bucket(report, client, source, rounds, data, megabytes)
        from_bucket(report, client, folder, source, rounds, data, megabytes)
        to_mirror(report, client, folder, source, rounds, data, megabytes)


def to_folder(report: Report, folder: Path, source: Path, rounds: int, data: str, megabytes: int) -> None:
    """Uploading with hash, manifest and COMMIT, beside copying the same files with nothing checked."""
    store = LocalStorage(folder / "to")
    claim_attempt(store, fresh=False)
    names = _names()

    def verified() -> float:
        name = next(names)
        with _rate(megabytes) as rate:
            _save(store, name, source)
        store.delete_folder(f"{FOLDER}/{name}")
        return rate()

    def plain() -> float:
        with _rate(megabytes) as rate:
            for file in sorted(source.iterdir()):
                store.upload(file, f"plain/{file.name}")
        store.delete_folder("plain")
        return rate()

    found = interleaved({"verified": verified, "plain": plain}, rounds)
    ours = Side("hashed, with manifest and COMMIT", found["verified"])
    report.compare("upload to a folder", data, "MiB/s", ours, Side("the same files alone", found["plain"]))


def to_bucket(report: Report, client: storage.Client, source: Path, rounds: int, data: str, megabytes: int) -> None:
    """The same to a bucket, beside transfer_manager with as many threads."""
    store = GcsStorage(f"gs://{BUCKET}/up", client=client)
    claim_attempt(store, fresh=False)
    names = _names()

    def ours() -> float:
        name = next(names)
        with _rate(megabytes) as rate:
            _save(store, name, source)
        store.delete_folder(f"{FOLDER}/{name}")
        return rate()

    def theirs() -> float:
        with _rate(megabytes) as rate:
            _upload_many(client, source, "plain/")
        store.delete_folder("plain")
        return rate()

    found = interleaved({"ours": ours, "theirs": theirs}, rounds)
    mine = Side("hashed, with manifest and COMMIT", found["ours"])
    report.compare("upload to a bucket", data, "MiB/s", mine, Side("transfer_manager", found["theirs"]))


def from_bucket(
    report: Report, client: storage.Client, folder: Path, source: Path, rounds: int, data: str, megabytes: int
) -> None:
    """Fetching a checkpoint for resuming, every file compared with its manifest, beside transfer_manager."""
    store = GcsStorage(f"gs://{BUCKET}/down", client=client)
    claim_attempt(store, fresh=False)
    name = next(_names())
    _save(store, name, source)
    checkpoint = verify(store, name)
    numbers = iter(range(10**6))

    def ours() -> float:
        number = next(numbers)
        os.environ["VLMPIPE_CACHE_DIR"] = str(folder / f"cache-{number}")  # else the second round finds the files
        with _rate(megabytes) as rate:
            fetch_folder(store, checkpoint, folder / f"fetched-{number}")
        return rate()

    def theirs() -> float:
        blobs = [f"down/{FOLDER}/{name}/{file.name}" for file in sorted(source.iterdir())]
        with _rate(megabytes) as rate:
            transfer_manager.download_many_to_path(
                client.bucket(BUCKET),
                blobs,
                str(folder / f"plain-{next(numbers)}"),
                worker_type=transfer_manager.THREAD,
                max_workers=THREADS,
                raise_exception=True,
            )
        return rate()

    found = interleaved({"ours": ours, "theirs": theirs}, rounds)
    mine = Side("compared with the manifest", found["ours"])
    report.compare("download from a bucket", data, "MiB/s", mine, Side("transfer_manager", found["theirs"]))


def to_mirror(
    report: Report, client: storage.Client, folder: Path, source: Path, rounds: int, data: str, megabytes: int
) -> None:
    """The second copy that sync_checkpoint makes, beside the slower of reading the files and of uploading them."""
    store, numbers = LocalStorage(folder / "run"), iter(range(10**6))
    claim_attempt(store, fresh=False)
    name = next(_names())
    _save(store, name, source)
    checkpoint = verify(store, name)

    def ours() -> float:
        target = GcsStorage(f"gs://{BUCKET}/mirror-{next(numbers)}", client=client)
        with _rate(megabytes) as rate:
            mirror_checkpoint(store, target, checkpoint)
        target.delete_folder(FOLDER)
        return rate()

    def disk() -> float:
        with _rate(megabytes) as rate:
            for file in sorted(source.iterdir()):
                with file.open("rb") as reading:
                    while reading.read(CHUNK_BYTES):
                        pass
        return rate()

    def theirs() -> float:
        with _rate(megabytes) as rate:
            _upload_many(client, source, "beside/")
        GcsStorage(f"gs://{BUCKET}/beside", client=client).delete_folder("")
        return rate()

    found = interleaved({"ours": ours, "disk": disk, "store": theirs}, rounds)
    slower = min(("disk", "store"), key=lambda side: sum(found[side]))
    label = {"disk": "reading the files", "store": "transfer_manager"}[slower]
    mine, other = Side("sync_checkpoint", found["ours"]), Side(label, found[slower])
    report.compare("copy to a mirror", data, "MiB/s", mine, other)


def _upload_many(client: storage.Client, source: Path, prefix: str) -> None:
    transfer_manager.upload_many_from_filenames(
        client.bucket(BUCKET),
        [file.name for file in sorted(source.iterdir())],
        source_directory=str(source),
        blob_name_prefix=prefix,
        worker_type=transfer_manager.THREAD,
        max_workers=THREADS,
        raise_exception=True,
    )


def _save(store: Storage, name: str, source: Path) -> None:
    upload_node_files(store, name, 0, source)
    commit(store, name, dataclasses.replace(RECORD, step=int(name.split("-")[1])))


def _names() -> Iterator[str]:
    return (checkpoint_name(1, step, "bench") for step in range(1, 10**6))


@contextmanager
def _rate(megabytes: int) -> Iterator[Callable[[], float]]:
    """Times the block; what it gives says MiB a second afterwards."""
    seconds = 0.0
    started = time.perf_counter()
    yield lambda: megabytes / seconds
    seconds = time.perf_counter() - started
