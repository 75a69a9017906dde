"""What each rank holds and has waited for, brought together: one rank that stands out slows down all others."""

from __future__ import annotations

import resource
from dataclasses import dataclass

import torch
import torch.distributed as dist

from trainer.worker import Worker

GIB = 1 << 30


@dataclass(frozen=True)
class Gauges:
    """By rank, since training started there."""

    peak_memory_gib: list[float]
    data_wait_s: list[float]


def gather_gauges(worker: Worker, data_wait_s: float) -> Gauges:
    """Collective. `data_wait_s` is this rank's own."""
    mine = torch.tensor([_peak_memory_bytes(worker) / GIB, data_wait_s], dtype=torch.float64, device=worker.device)
    found = [torch.empty_like(mine) for _ in range(worker.world_size)]
    dist.all_gather(found, mine)
    memory, waits = torch.stack(found).T.tolist()
    return Gauges(memory, waits)


def _peak_memory_bytes(worker: Worker) -> int:
    """The most that torch's allocator has reserved of the GPU; without one, that this process has held of memory."""
    if worker.device.type == "cuda":
        return int(torch.cuda.max_memory_reserved(worker.device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
