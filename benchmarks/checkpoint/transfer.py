"""Part `transfer`: a checkpoint up, down and to a second place, beside plain copies and the client library's manager.

The bucket is the strict stand-in on this machine: these figures show what each side costs, and nothing about a network.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from google.cloud import storage
from google.cloud.storage import transfer_manager

from benchmarks.checkpoint.bucket_server import BUCKET, bucket_server
from benchmarks.checkpoint.stacked_layers import RECORD
from benchmarks.support.report import Side
from benchmarks.support.suite import Bench
from benchmarks.support.timing import timed_s
from vlmpipe.trainer.checkpoint.attempts import claim_attempt
from vlmpipe.trainer.checkpoint.commit import FOLDER, checkpoint_name, commit, upload_node_files
from vlmpipe.trainer.checkpoint.mirror.copies import mirror_checkpoint
from vlmpipe.trainer.checkpoint.verified_files import fetch_folder, verify
from vlmpipe.trainer.storage.base import CHUNK_BYTES, Storage
from vlmpipe.trainer.storage.gcs import GcsStorage
from vlmpipe.trainer.storage.local import LocalStorage
from vlmpipe.trainer.storage.transfer import THREADS

MIB = 2**20
FILES = 8
SIZE_MIB = 512  # small beside a real checkpoint, large beside the requests that a save makes whatever its size
IN_THREADS: dict[str, Any] = {
    "worker_type": transfer_manager.THREAD, "max_workers": THREADS, "raise_exception": True,
}  # fmt: skip
MANAGER = "transfer_manager"


def transfer(bench: Bench) -> None:
    """All comparisons, over the same files."""
    size_mib = 16 if bench.quick else SIZE_MIB
    source = bench.scratch / "source"
    source.mkdir()
    for number in range(FILES):
        (source / f"shard-{number}").write_bytes(os.urandom(size_mib * MIB // FILES))
    bench.expect(4)
    transfers = Transfers(bench, source, size_mib)
    transfers.to_folder()
    with bucket_server() as client:
        transfers.to_bucket(client)
        transfers.from_bucket(client)
        transfers.to_mirror(client)


class Transfers:
    """The same files, moved in several ways."""

    def __init__(self, bench: Bench, source: Path, size_mib: int) -> None:
        self._bench, self._size_mib = bench, size_mib
        self._source, self._files = source, sorted(source.iterdir())
        self._steps = itertools.count(1)

    def to_folder(self) -> None:
        """Uploading with hash, manifest and COMMIT, beside copying the same files with nothing checked."""
        store = LocalStorage(self._bench.scratch / "to")

        def copy() -> None:
            for file in self._files:
                store.upload(file, f"plain/{file.name}")

        def plain() -> float:
            rate = self._rate(copy)
            store.delete_folder("plain")
            return rate

        sides = {"hashed, with manifest and COMMIT": self._committing(store), "the same files alone": plain}
        self._compare("upload to a folder", sides)

    def to_bucket(self, client: storage.Client) -> None:
        """The same to a bucket, beside transfer_manager with as many threads."""
        store = GcsStorage(f"gs://{BUCKET}/up", client=client)

        def theirs() -> float:
            rate = self._rate(lambda: self._upload_many(client, "up/plain/"))
            store.delete_folder("plain")
            return rate

        sides = {"hashed, with manifest and COMMIT": self._committing(store), MANAGER: theirs}
        self._compare("upload to a bucket", sides)

    def from_bucket(self, client: storage.Client) -> None:
        """Fetching a checkpoint for resuming, every file compared with its manifest, beside transfer_manager."""
        store = GcsStorage(f"gs://{BUCKET}/down", client=client)
        name = self._save(store)
        checkpoint = verify(store, name)
        blobs = [f"down/{FOLDER}/{name}/{file.name}" for file in self._files]

        def ours() -> float:
            folder = self._folder()
            os.environ["VLMPIPE_CACHE_DIR"] = str(folder / "cache")  # else the second round finds the files
            return self._rate(lambda: fetch_folder(store, checkpoint, folder / "fetched"))

        def theirs() -> float:
            folder, bucket = str(self._folder()), client.bucket(BUCKET)
            return self._rate(lambda: transfer_manager.download_many_to_path(bucket, blobs, folder, **IN_THREADS))

        self._compare("download from a bucket", {"compared with the manifest": ours, MANAGER: theirs})

    def to_mirror(self, client: storage.Client) -> None:
        """The second copy that sync_checkpoint makes, beside the slower of reading the files and of uploading them."""
        store = LocalStorage(self._bench.scratch / "run")
        checkpoint = verify(store, self._save(store))

        def ours() -> float:
            target = GcsStorage(f"gs://{BUCKET}/mirror-{next(self._steps)}", client=client)
            rate = self._rate(lambda: mirror_checkpoint(store, target, checkpoint))
            target.delete_folder(FOLDER)
            return rate

        def theirs() -> float:
            rate = self._rate(lambda: self._upload_many(client, "beside/"))
            GcsStorage(f"gs://{BUCKET}/beside", client=client).delete_folder("")
            return rate

        sides = {"sync_checkpoint": ours, "reading the files": lambda: self._rate(self._read), MANAGER: theirs}
        self._compare("copy to a mirror", sides)

    def _compare(self, claim: str, sides: dict[str, Callable[[], float]]) -> None:
        """The first side beside the slowest of the others."""
        found = self._bench.take_turns(claim, sides)
        first, *others = sides
        slowest = min(others, key=lambda side: sum(found[side]))
        data = f"{FILES} files, {self._size_mib} MiB"
        self._bench.report.compare(claim, data, "MiB/s", Side(first, found[first]), Side(slowest, found[slowest]))

    def _committing(self, store: Storage) -> Callable[[], float]:
        def save() -> float:
            names: list[str] = []
            rate = self._rate(lambda: names.append(self._save(store)))
            store.delete_folder(f"{FOLDER}/{names[0]}")
            return rate

        claim_attempt(store, fresh=False)
        return save

    def _save(self, store: Storage) -> str:
        """The files as a committed checkpoint. Returns its name."""
        step = next(self._steps)
        name = checkpoint_name(1, step, "bench")
        upload_node_files(store, name, 0, self._source)
        commit(store, name, dataclasses.replace(RECORD, step=step))
        return name

    def _upload_many(self, client: storage.Client, prefix: str) -> None:
        transfer_manager.upload_many_from_filenames(
            client.bucket(BUCKET),
            [file.name for file in self._files],
            source_directory=str(self._source),
            blob_name_prefix=prefix,
            **IN_THREADS,
        )

    def _read(self) -> None:
        for file in self._files:
            with file.open("rb") as reading:
                while reading.read(CHUNK_BYTES):
                    pass

    def _folder(self) -> Path:
        folder = self._bench.scratch / f"down-{next(self._steps)}"
        folder.mkdir()
        return folder

    def _rate(self, work: Callable[[], object]) -> float:
        """MiB a second."""
        return self._size_mib / timed_s(work)()
