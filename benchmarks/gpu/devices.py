"""Part `devices` of `benchmarks.on_gpu`: whether a rank uses other ranks' GPUs when it saves."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed import ProcessGroup

from benchmarks.support.report import Side
from benchmarks.support.suite import Bench
from tests.support.trainer.checkpoints import record
from vlmpipe.trainer.checkpoint.async_saver import CheckpointSaver
from vlmpipe.trainer.checkpoint.failed_saves import FailedSaves
from vlmpipe.trainer.checkpoint.retention import Retention
from vlmpipe.trainer.distributed.agreement import agree
from vlmpipe.trainer.distributed.process import start_worker
from vlmpipe.trainer.storage.local import LocalStorage
from vlmpipe.trainer.strategies.named_checkpoint import host_stager

RANKS = 2
NUMBERS = 1 << 22  # 16 MiB, more than torch's writer takes without waiting for its stream


def devices(bench: Bench) -> None:
    """GPUs of others on which a rank has a context after a save. Each takes 0.3 to 0.6 GB there."""
    if torch.cuda.device_count() < RANKS and not bench.quick:
        bench.report.note(f"contexts on GPUs of other ranks: not measured, this machine has fewer than {RANKS} GPUs")
        return
    found = bench.call("benchmarks.gpu.devices:contexts_elsewhere", {}, ranks=RANKS)
    bench.report.figure("a save's contexts on GPUs of other ranks", f"{RANKS} ranks", "contexts", Side("dcp", [found]))


def contexts_elsewhere() -> int:
    """Of all ranks together, after each has saved a tensor of its GPU in the background."""
    worker = start_worker()
    with tempfile.TemporaryDirectory(prefix="vlmpipe-bench-") as scratch:
        store = LocalStorage(Path(agree(scratch)) / "run")
        strategy: Any = OneTensor(worker.device)
        saver = CheckpointSaver(store, strategy, worker, Retention(1), FailedSaves(limit_s=0.0))
        saver.save(record(world_size=worker.world_size, num_nodes=worker.num_nodes))
        saver.finish()
    others = [one for one in range(torch.cuda.device_count()) if one != worker.device.index]
    has_context: Any = getattr(torch._C, "_cuda_hasPrimaryContext", None)  # only where torch has CUDA
    count = torch.tensor(sum(map(has_context, others)))
    dist.all_reduce(count)
    return int(count)


class OneTensor:
    """A strategy whose state is one tensor on the device."""

    checkpoint_format = "dcp"

    def __init__(self, device: torch.device) -> None:
        self._weight = torch.ones(NUMBERS, device=device)
        self._stager = host_stager(on_gpu=device.type == "cuda")

    def snapshot(self, folder: Path, group: ProcessGroup) -> Callable[[], None]:
        state: Any = self._stager.stage({"weight": self._weight})
        writer = dcp.FileSystemWriter(folder, single_file_per_rank=True)
        return lambda: dcp.save(state, storage_writer=writer, process_group=group)
