"""Part `checkpoint` of `benchmarks.on_gpu`: how long a snapshot holds training up."""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch.distributed as dist

from benchmarks.gpu.run import GIB, MIDDLE, TINY, alone, case_of, each, wait
from benchmarks.support.report import Side
from benchmarks.support.suite import Bench
from benchmarks.support.tiny_run import TinyRun
from tests.support.trainer.memory_cases import BF16

SNAPSHOTS = 3


def checkpoint(bench: Bench) -> None:
    """How long a snapshot holds training up, and how long its writing takes behind it. The first makes its buffers."""
    size, worker = (TINY if bench.quick else MIDDLE), bench.worker  # which starts the process group
    group = dist.new_group(backend="gloo")
    for strategy, _ in each(bench, dict.fromkeys(("ddp", "fsdp", "zero2")), 1):
        case = case_of(size, strategy, BF16)
        with bench.going_on(strategy):
            found = alone(partial(snapshots_of, group=group), case, size, worker)
            label = f"{found.saved_bytes / GIB:.2f} GiB"
            bench.report.figure("training held up, first snapshot", strategy, "s", Side(label, found.held_s[:1]))
            bench.report.figure("training held up, later ones", strategy, "s", Side(label, found.held_s[1:]))
            rate = found.saved_bytes / statistics.median(found.written_s) / 1e9
            bench.report.figure("written behind training", strategy, "GB/s", Side(label, [rate]))


@dataclass(frozen=True)
class Snapshots:
    saved_bytes: int
    held_s: list[float]
    written_s: list[float]


def snapshots_of(run: TinyRun, *, group: dist.ProcessGroup) -> Snapshots:
    held_s, written_s, saved_bytes = [], [], 0
    with tempfile.TemporaryDirectory(prefix="vlmpipe-bench-") as scratch:
        for number in range(SNAPSHOTS):
            run.step()
            wait(run.worker)
            folder = Path(scratch, str(number))
            folder.mkdir()
            started_s = time.perf_counter()
            write = run.strategy.snapshot(folder, group)
            held_s.append(time.perf_counter() - started_s)
            write()
            written_s.append(time.perf_counter() - started_s - held_s[-1])
            saved_bytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
            shutil.rmtree(folder)  # disks there are small
    return Snapshots(saved_bytes, held_s, written_s)
