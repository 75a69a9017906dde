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

from benchmarks.checkpoint_moving import RECORD, moving
from benchmarks.checkpoint_resuming import resuming
from benchmarks.common import interleaved, options
from benchmarks.report import Report, Side
from benchmarks.stacked_layers import WIDTH, Trained
from trainer.checkpoint.async_saver import CheckpointSaver
from trainer.checkpoint.mirror import newest_good_of
from trainer.distributed.process import ProcessContext, start_worker

MIB = 2**20
STALL_LAYERS, RUN_LAYERS = 24, 6
SHARDS, SHARD_WIDTH = 1000, 256  # a shard is 256 KiB
MOVED_MIB = 512  # small beside a real checkpoint, large beside the requests that a save makes whatever its size
PARTS = ("stall", "overhead", "resuming", "moving")
STEP_S = 0.2  # a step of the run whose overhead is measured


def main() -> None:
    chosen = options(__doc__, PARTS)
    rounds = chosen.rounds or (2 if chosen.quick else 7)
    report = Report("What checkpoints cost", {"rounds": rounds})
    worker = start_worker()
    with tempfile.TemporaryDirectory(prefix="vlmpipe-bench-") as scratch:
        if "stall" in chosen.only:
            stall(report, worker, Path(scratch, "stall"), rounds, layers=4 if chosen.quick else STALL_LAYERS)
        if "overhead" in chosen.only:
            overhead(report, worker, Path(scratch, "run"), 1 if chosen.quick else 3, steps=20 if chosen.quick else 200)
        if "resuming" in chosen.only:
            shards, width = (50, 64) if chosen.quick else (SHARDS, SHARD_WIDTH)
            resuming(report, worker, Path(scratch, "resume"), rounds, shards=shards, width=width)
        if "moving" in chosen.only:
            moving(report, Path(scratch, "move"), rounds, megabytes=16 if chosen.quick else MOVED_MIB)
    report.publish(chosen)


def stall(report: Report, worker: ProcessContext, folder: Path, rounds: int, *, layers: int) -> None:
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

    sides = {"async": save(trained.saver(async_save=True)), "sync": save(trained.saver(async_save=False))}
    found = interleaved(sides, rounds)
    size_mib = 3 * layers * WIDTH * WIDTH * 4 / MIB
    report.require(newest_good_of([trained.store])[1] is not None, "the last save verifies")
    mine = Side("saved in the background", [1 / seconds for seconds in found["async"]])
    other = Side("saved while training waits", [1 / seconds for seconds in found["sync"]])
    report.compare("stall of a save", f"{size_mib:.0f} MiB of state", "1 / s", mine, other)
    shares = [100 * a / b for a, b in zip(found["async"], found["sync"], strict=True)]
    report.figure("stall as a share of a waiting save", f"{size_mib:.0f} MiB of state", "%", Side("stall", shares))


def overhead(report: Report, worker: ProcessContext, folder: Path, rounds: int, *, steps: int) -> None:
    """A run that saves every 100 steps beside the same run that never saves."""
    every = min(100, steps // 2)
    trained = Trained(RUN_LAYERS, folder, worker)
    saver = trained.saver(async_save=True)
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


if __name__ == "__main__":
    main()
