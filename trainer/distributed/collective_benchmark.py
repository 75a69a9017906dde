"""Measures collectives by size, inside a node and across nodes (`train.measure_communication`).

Bus bandwidth is the load of the slowest link, comparable between numbers of ranks n: for a whole tensor of S bytes that
takes t seconds, S / t * 2 (n - 1) / n of an all-reduce, S / t * (n - 1) / n of an all-gather or a reduce-scatter
(nccl-tests, doc/PERFORMANCE.md).
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from trainer.distributed.process import ProcessContext
from trainer.storage import open_storage

FILE = "communication.json"
MIB = 1 << 20
# From latency-bound to bandwidth-bound sizes.
GPU_SIZES_BYTES = (MIB, 16 * MIB, 128 * MIB, 512 * MIB)
CPU_SIZES_BYTES = (MIB // 16, MIB, 8 * MIB)
WARM_UPS, REPETITIONS = 2, 5
PASSES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}  # times that the bytes go round the ring


@dataclass(frozen=True)
class Speed:
    """One collective over one kind of group. seconds: the slowest rank's median."""

    among: str  # "all ranks", "ranks of a node" or "one rank of each node"
    ranks: int
    collective: str
    bytes: int
    seconds: float

    @property
    def bus_gb_per_s(self) -> float:
        """Bus bandwidth, 10^9 bytes a second."""
        return PASSES[self.collective] * (self.ranks - 1) / self.ranks * self.bytes / self.seconds / 1e9


def measure_communication(run_uri: str, worker: ProcessContext) -> list[Speed]:
    """Time the collectives that strategies use, print a table and write `<run>/communication.json`. Collective.

    It takes seconds, and memory of up to twice the largest size.
    """
    if worker.world_size == 1:
        print("communication: one rank, nothing to measure", flush=True)
        return []
    sizes = GPU_SIZES_BYTES if worker.device.type == "cuda" else CPU_SIZES_BYTES
    speeds = [
        Speed(among, len(ranks), collective, size, seconds)
        for among, groups in _groups(worker).items()
        for ranks, found in [_in_my_group(groups, worker, sizes)]
        for (collective, size), seconds in found.items()
    ]
    if worker.is_first:
        content = [asdict(speed) | {"bus_gb_per_s": speed.bus_gb_per_s} for speed in speeds]
        open_storage(run_uri).write(FILE, json.dumps(content).encode())
        print("\n".join(_table(speeds)), flush=True)
    return speeds


def _groups(worker: ProcessContext) -> dict[str, list[list[int]]]:
    """Kind of group -> ranks of each group, without kinds that equal all ranks."""
    local, nodes = worker.local_world_size, worker.num_nodes
    kinds = {"all ranks": [list(range(worker.world_size))]}
    if local > 1 and nodes > 1:
        kinds["ranks of a node"] = [[node * local + rank for rank in range(local)] for node in range(nodes)]
        kinds["one rank of each node"] = [[node * local + rank for node in range(nodes)] for rank in range(local)]
    return kinds


def _in_my_group(
    groups: list[list[int]], worker: ProcessContext, sizes: tuple[int, ...]
) -> tuple[list[int], dict[tuple[str, int], float]]:
    """This rank's group, and the seconds of the slowest rank of any group. All groups work at the same time."""
    mine, _ = dist.new_subgroups_by_enumeration(groups)
    ranks = next(ranks for ranks in groups if worker.rank in ranks)
    cases = [(collective, size) for collective in PASSES for size in sizes]
    medians = [_seconds(_work(*case, len(ranks), mine, worker), worker) for case in cases]
    slowest = torch.tensor(medians, dtype=torch.float64, device=worker.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    dist.destroy_process_group(mine)  # frees its buffers on the GPU
    return ranks, dict(zip(cases, slowest.tolist(), strict=True))


def _work(collective: str, size: int, ranks: int, group: ProcessGroup, worker: ProcessContext) -> Callable[[], object]:
    """The collective over a tensor of `size` bytes, rounded up to a multiple of the number of ranks."""
    share = torch.zeros(-(-size // (4 * ranks)), device=worker.device)
    whole = torch.zeros(len(share) * ranks, device=worker.device)
    # New names since torch 2.13, which deprecates the others.
    all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    works: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: all_gather(whole, share, group=group),
        "reduce_scatter": lambda: reduce_scatter(share, whole, group=group),
    }
    return works[collective]


def _seconds(work: Callable[[], object], worker: ProcessContext) -> float:
    """Median time of a call, after warm-up calls that open connections."""

    def once() -> float:
        dist.barrier()
        if worker.device.type == "cuda":
            torch.cuda.synchronize()
        started_s = time.perf_counter()
        work()
        if worker.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started_s

    return statistics.median([once() for _ in range(WARM_UPS + REPETITIONS)][WARM_UPS:])


def _table(speeds: list[Speed]) -> list[str]:
    head = f"communication: {'among':<22} {'ranks':>5} {'collective':<14} {'MiB':>8} {'ms':>10} {'bus GB/s':>9}"
    return [head] + [
        f"communication: {one.among:<22} {one.ranks:>5} {one.collective:<14} "
        f"{one.bytes / MIB:>8.4g} {1000 * one.seconds:>10.3f} {one.bus_gb_per_s:>9.2f}"
        for one in speeds
    ]
