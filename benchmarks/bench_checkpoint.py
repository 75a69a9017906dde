"""What saving costs: the stall of a save, the overhead of a run, sync and resume. `make bench-checkpoint`

Real strategy, real commit protocol, one process. Uploads go to a folder, or to the strict stand-in for Cloud Storage on
this machine: they show what our side costs, and nothing about a network.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.common import interleaved, options
from benchmarks.report import Report, Side
from trainer.batches import RowBatch
from trainer.checkpoint.attempts import claim_attempt
from trainer.checkpoint.commit import (
    CommitRecord,
    Listing,
    checkpoint_name,
    commit,
    inspect,
    newest_good,
    upload_node_files,
)
from trainer.checkpoint.retention import Retention
from trainer.checkpoint.saver import CheckpointSaver
from trainer.config import OptimizerConfig, TrainConfig
from trainer.storage import LocalStorage, Storage, open_storage
from trainer.strategies.ddp import Ddp
from trainer.worker import Worker, start_worker

MIB = 2**20
WIDTH = 1024
STALL_LAYERS, RUN_LAYERS = 24, 6  # a layer is 4 MiB of weights, three times that with Adam's moments
SHARDS = 1000
STEP_S = 0.05  # a step of the run whose overhead is measured
RECORD = CommitRecord(
    attempt=1,
    epoch=0,
    step=0,
    rows_consumed=0,
    world_size=1,
    num_nodes=1,
    strategy="ddp",
    checkpoint_format="dcp",
    plan_sha256="",
    model_sha256="",
    tower_sha256="",
    versions={},
)
TRAIN = TrainConfig(
    global_batch_rows=1, optimizer=OptimizerConfig(learning_rate=1e-3), precision="fp32", clip_grad_norm=0.0
)


class Layers(nn.Module):
    """A stack of square layers that takes the place of a model."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))

    def forward(self, images: Tensor, **_: Tensor) -> Tensor:
        for layer in self.layers:
            images = layer(images)
        return images.sum()


class Trained:
    """A strategy that has made a step, so that the optimizer has its state, and a store to save to."""

    def __init__(self, layers: int, folder: Path, worker: Worker) -> None:
        torch.manual_seed(0)
        self.strategy, self.worker = Ddp(TRAIN, Layers(layers), worker), worker
        self.store = LocalStorage(folder)
        claim_attempt(self.store, fresh=False)
        self.step()

    def step(self) -> None:
        """One training step."""
        none = torch.zeros(1, dtype=torch.int64)
        self.strategy.forward_backward([RowBatch(none, none, none, none, torch.ones(1, WIDTH))], 1)
        self.strategy.step(1.0)

    def saver(self, *, asynchronous: bool) -> CheckpointSaver:
        """A saver that keeps one checkpoint."""
        return CheckpointSaver(self.store, self.strategy, self.worker, Retention(1), asynchronous=asynchronous)


def main() -> None:
    chosen = options(__doc__)
    rounds = chosen.rounds or (2 if chosen.quick else 7)
    report = Report("What checkpoints cost", {"rounds": rounds})
    worker = start_worker()
    with tempfile.TemporaryDirectory(prefix="vlmpipe-bench-") as scratch:
        stall(report, worker, Path(scratch, "stall"), rounds, layers=4 if chosen.quick else STALL_LAYERS)
        overhead(report, worker, Path(scratch, "run"), 1 if chosen.quick else 3, steps=20 if chosen.quick else 200)
        resolve(report, Path(scratch, "resolve"), rounds, shards=50 if chosen.quick else SHARDS)
        sync(report, Path(scratch, "sync"), rounds, megabytes=16 if chosen.quick else 256)
    report.publish(chosen)


def stall(report: Report, worker: Worker, folder: Path, rounds: int, *, layers: int) -> None:
    """How long training stands still for a save, beside a save that waits for its COMMIT."""
    trained = Trained(layers, folder, worker)
    steps = iter(range(1, 10**6))

    def save(saver: CheckpointSaver) -> Callable[[], float]:
        def timed() -> float:
            record = dataclasses.replace(RECORD, step=next(steps))
            started = time.perf_counter()
            saver.save(record)
            stalled = time.perf_counter() - started
            saver.finish()
            return stalled

        return timed

    sides = {"async": save(trained.saver(asynchronous=True)), "sync": save(trained.saver(asynchronous=False))}
    found = interleaved(sides, rounds)
    size_mib = 3 * layers * WIDTH * WIDTH * 4 / MIB
    report.require(newest_good(trained.store)[0] is not None, "the last save verifies")
    mine = Side("saved in the background", [1 / seconds for seconds in found["async"]])
    other = Side("saved while training waits", [1 / seconds for seconds in found["sync"]])
    report.compare("stall of a save", f"{size_mib:.0f} MiB of state", "1 / s", mine, other)
    shares = [100 * a / b for a, b in zip(found["async"], found["sync"], strict=True)]
    report.figure("stall as a share of a waiting save", f"{size_mib:.0f} MiB of state", "%", Side("stall", shares))


def overhead(report: Report, worker: Worker, folder: Path, rounds: int, *, steps: int) -> None:
    """A run that saves every 100 steps beside the same run that never saves."""
    every = min(100, steps // 2)
    trained = Trained(RUN_LAYERS, folder, worker)
    saver = trained.saver(asynchronous=True)
    numbers = iter(range(1, 10**6))

    def run(saves: bool) -> Callable[[], float]:
        def timed() -> float:
            started = time.perf_counter()
            for step in range(1, steps + 1):
                step_ends = time.perf_counter() + STEP_S
                trained.step()
                while time.perf_counter() < step_ends:  # a step of a known length, as on a device that computes
                    time.sleep(0.001)
                if saves and step % every == every // 2:  # none at the end: every run waits for its last one, once
                    saver.save(dataclasses.replace(RECORD, step=next(numbers)))
            saver.finish()
            return time.perf_counter() - started

        return timed

    found = interleaved({"saves": run(True), "never": run(False)}, rounds, warm_up=False)
    shares = [100 * (a / b - 1) for a, b in zip(found["saves"], found["never"], strict=True)]
    what = f"{steps} steps of {1000 * STEP_S:.0f} ms, a save every {every}"
    report.figure("overhead of a run", what, "%", Side("more wall time than without saves", shares))


def resolve(report: Report, folder: Path, rounds: int, *, shards: int) -> None:
    """Finding and checking the newest checkpoint, without reading its files."""
    store = LocalStorage(folder / "run")
    _checkpoint(store, folder, shards, 1024)

    def found() -> float:
        started = time.perf_counter()
        listing = Listing.read(store)
        inspect(store, listing.committed[-1], listing)
        return time.perf_counter() - started

    seconds = interleaved({"resolve": found}, rounds)["resolve"]
    report.figure("resolve the newest checkpoint", f"{shards} files in a folder", "s", Side("one look", seconds))


def sync(report: Report, folder: Path, rounds: int, *, megabytes: int) -> None:
    """Uploading with hash, manifest and COMMIT, beside copying the same files with nothing checked."""
    source = folder / "source"
    source.mkdir(parents=True)
    for number in range(8):
        (source / f"shard-{number}").write_bytes(bytes([number]) * (megabytes * MIB // 8))
    numbers = iter(range(1, 10**6))
    store = open_storage(str(folder / "to"))
    claim_attempt(store, fresh=False)

    def verified() -> float:
        name = checkpoint_name(1, next(numbers), "bench")
        started = time.perf_counter()
        upload_node_files(store, name, 0, source)
        commit(store, name, dataclasses.replace(RECORD, step=int(name.split("-")[1])))
        seconds = time.perf_counter() - started
        store.delete_folder(f"checkpoints/{name}")
        return megabytes / seconds

    def plain() -> float:
        started = time.perf_counter()
        for file in sorted(source.iterdir()):
            store.upload(file, f"plain/{file.name}")
        seconds = time.perf_counter() - started
        store.delete_folder("plain")
        return megabytes / seconds

    found = interleaved({"verified": verified, "plain": plain}, rounds)
    report.compare(
        "upload of a checkpoint",
        f"8 files, {megabytes} MiB, to a folder",
        "MiB/s",
        Side("hashed, with manifest and COMMIT", found["verified"]),
        Side("the same files alone", found["plain"]),
    )


def _checkpoint(store: Storage, folder: Path, shards: int, size_bytes: int) -> None:
    staging = folder / "staging"
    staging.mkdir(parents=True)
    for number in range(shards):
        (staging / f"shard-{number:05d}").write_bytes(bytes(size_bytes))
    claim_attempt(store, fresh=False)
    name = checkpoint_name(1, 1, "bench")
    upload_node_files(store, name, 0, staging)
    commit(store, name, dataclasses.replace(RECORD, step=1))


if __name__ == "__main__":
    main()
