"""Gathers each rank's peak memory, waiting and forward time, to find stragglers."""

from __future__ import annotations

import resource
from dataclasses import dataclass

import torch
import torch.distributed as dist

from trainer.distributed.process import ProcessContext

GIB = 1 << 30


@dataclass(frozen=True)
class RankMetrics:
    """By rank, since training started."""

    peak_memory_gib: list[float]
    data_wait_s: list[float]
    forward_s: list[float]  # 0 where it is not timed
    num_reducers: list[float]  # reducers that the rank is connected to

    @classmethod
    def at_start(cls, ranks: int) -> RankMetrics:
        return cls([0.0] * ranks, [0.0] * ranks, [0.0] * ranks, [0.0] * ranks)


def gather_rank_metrics(worker: ProcessContext, data_wait_s: float, forward_s: float, num_reducers: int) -> RankMetrics:
    """All ranks' metrics, given this rank's own. Collective."""
    own = [_peak_memory_bytes(worker) / GIB, data_wait_s, forward_s, num_reducers]
    mine = torch.tensor(own, dtype=torch.float64, device=worker.device)
    found = [torch.empty_like(mine) for _ in range(worker.world_size)]
    dist.all_gather(found, mine)
    return RankMetrics(*torch.stack(found).T.tolist())


def _peak_memory_bytes(worker: ProcessContext) -> int:
    """Most GPU memory that torch's allocator has reserved; on a CPU, this process's peak resident memory."""
    if worker.device.type == "cuda":
        return int(torch.cuda.max_memory_reserved(worker.device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
