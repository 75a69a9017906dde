"""Part `resume`: finding the newest checkpoint, verifying it, loading it, and making the first step.

And what a resume and an export read, beside what they load.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

from benchmarks.checkpoint.stacked_layers import RECORD, Trained
from benchmarks.support.report import Side
from benchmarks.support.suite import Bench
from benchmarks.support.timing import timed_s
from vlmpipe.trainer.checkpoint.commit import (
    Checkpoint,
    Listing,
    checkpoint_name,
    commit,
    committed,
    inspect,
    read_commit,
    upload_node_files,
)
from vlmpipe.trainer.checkpoint.export.weight_reader import open_weights
from vlmpipe.trainer.checkpoint.resume import resume as resume_from
from vlmpipe.trainer.checkpoint.verified_files import CheckpointFiles, fetch_folder
from vlmpipe.trainer.records.commit import CommitRecord
from vlmpipe.trainer.storage.local import LocalStorage
from vlmpipe.trainer.strategies.torch_base import STATE_OPTIONS

TENSORS_OF_A_LAYER = 4  # its weights, Adam's two moments and its count of steps; each a file of its own here
SHARDS, SHARD_WIDTH = 1000, 256  # a shard is 256 KiB


def resume(bench: Bench) -> None:
    """A checkpoint of many files, through each stage of a resume."""
    shards, width = (50, 64) if bench.quick else (SHARDS, SHARD_WIDTH)
    folder, worker = bench.scratch / "resume", bench.worker
    trained = Trained(shards // TENSORS_OF_A_LAYER, folder / "run", worker, width=width)
    record, size_mib = _save(trained, folder / "staging")
    data = f"{len(list((folder / 'staging').iterdir()))} files, {size_mib:.0f} MiB in a folder"

    def find() -> None:
        listing = Listing.read(trained.store)
        inspect(trained.store, listing.committed[-1], listing)

    def verify() -> None:
        listing = Listing.read(trained.store)
        checkpoint, _ = inspect(trained.store, listing.committed[-1], listing)
        fetch_folder(trained.store, checkpoint, folder / f"fetched-{time.monotonic_ns()}")

    def load() -> None:
        resumed = resume_from([trained.store], trained.strategy, record, worker)
        bench.report.require(resumed is not None, "the checkpoint is resumed from")

    def load_and_step() -> None:
        load()
        trained.step()

    stages = {
        "find": find,
        "and verify every file": verify,
        "and load it": load,
        "and make a step": load_and_step,
    }
    found = bench.take_turns("stages of a resume", {name: timed_s(stage) for name, stage in stages.items()})
    for name, seconds in found.items():
        bench.report.figure(f"resume: {name}", data, "s", Side("from the start", seconds))
    _bytes_and_requests(bench, trained, record, data)


def _bytes_and_requests(bench: Bench, trained: Trained, record: CommitRecord, data: str) -> None:
    """Of one resume and one export, from a store that counts; these do not depend on the machine."""
    weights = sum(parameter.nbytes for parameter in trained.module.parameters())
    state = sum(
        held.nbytes for of_one in trained.optimizer.state.values() for held in of_one.values() if torch.is_tensor(held)
    )

    def export(store: Counting) -> None:
        name = committed(store)[-1]
        files = CheckpointFiles.of(store, Checkpoint(name, read_commit(store, name)))
        reader = open_weights(files, "dcp")
        found = sum(reader.read(weight).nbytes for weight in sorted(reader.names))
        bench.report.require(found == weights, "an export reads every weight")

    def load(store: Counting) -> None:
        bench.report.require(resume_from([store], trained.strategy, record, bench.worker) is not None, "it is resumed")

    for what, loaded, act in (("resume", weights + state, load), ("export", weights, export)):
        store = Counting(trained.store.root)
        act(store)
        read = [store.read_bytes / loaded]
        bench.report.figure(f"{what}: bytes read for each byte loaded", data, "x", Side("in ranges", read))
        bench.report.figure(f"{what}: requests", data, "requests", Side("in ranges", [float(store.requests)]))


class Counting(LocalStorage):
    """Counts what is read by name or by range."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.read_bytes = self.requests = 0
        self._lock = threading.Lock()

    def read(self, name: str, max_bytes: int | None = None) -> bytes:
        return self._counted(super().read(name, max_bytes))

    def read_range(self, name: str, start: int, end: int, *, version: str = "") -> bytes:
        return self._counted(super().read_range(name, start, end, version=version))

    def _counted(self, data: bytes) -> bytes:
        with self._lock:
            self.read_bytes, self.requests = self.read_bytes + len(data), self.requests + 1
        return data


def _save(trained: Trained, staging: Path) -> tuple[CommitRecord, float]:
    """One file for each tensor, as many ranks would leave them."""
    staging.mkdir(parents=True)
    model, optimizer = get_state_dict(trained.module, trained.optimizer, options=STATE_OPTIONS)
    writer = dcp.FileSystemWriter(staging, single_file_per_rank=False)
    dcp.save({"model": model, "optimizer": optimizer}, storage_writer=writer, process_group=dist.group.WORLD)
    name, record = checkpoint_name(1, 1, "bench"), dataclasses.replace(RECORD, step=1)
    upload_node_files(trained.store, name, 0, staging)
    commit(trained.store, name, record)
    return record, sum(file.stat().st_size for file in staging.iterdir()) / 2**20
