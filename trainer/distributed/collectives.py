"""Checks that ranks reach each other, and times collectives inside a node and across nodes.

Bus bandwidth is the load of the slowest link, comparable between numbers of ranks n: for a whole tensor of S bytes that
takes t seconds, S / t * 2 (n - 1) / n of an all-reduce, S / t * (n - 1) / n of an all-gather or a reduce-scatter
(nccl-tests, doc/PERFORMANCE.md).
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from vlmpipe.trainer.distributed.cluster_env import PREFLIGHT_FILE, REPORT_VARIABLE
from vlmpipe.trainer.distributed.process import ProcessContext
from vlmpipe.trainer.errors import ExitCode, UserError
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.records import write_record

FILE = "communication.json"
MIB = 1 << 20
# From latency-bound to bandwidth-bound sizes.
GPU_SIZES_BYTES = (MIB, 16 * MIB, 128 * MIB, 512 * MIB)
CPU_SIZES_BYTES = (MIB // 16, MIB, 8 * MIB)
CHECK_GPU_BYTES, CHECK_CPU_BYTES = 16 * MIB, MIB
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


def check_ranks(run_uri: str, worker: ProcessContext) -> dict[str, Any]:
    """Check and time an all-reduce, and write all nodes' reports to `<run>/preflight.json`. Collective.

    Raises UserError when the ranks cannot reach each other (1), or the sum is wrong (69).
    """
    speed = _checked_all_reduce(worker) if worker.world_size > 1 else {}
    reports: list[Any] = [None] * worker.world_size
    dist.all_gather_object(reports, os.environ.get(REPORT_VARIABLE, "") if worker.is_node_leader else "")
    result = {
        "world_size": worker.world_size,
        "nodes": [json.loads(text) for text in reports if text],
        "all_reduce": speed,
    }
    if worker.is_first:
        write_record(open_storage(run_uri), PREFLIGHT_FILE, result)
        if speed:
            print(
                f"preflight: {worker.world_size} ranks on {worker.num_nodes} nodes add {speed['bytes'] / MIB:g} "
                f"MiB in {1000 * speed['seconds']:,.2f} ms: bus bandwidth {speed['bus_gb_per_s']:,.2f} GB/s",
                flush=True,
            )
    return result


def _checked_all_reduce(worker: ProcessContext) -> dict[str, float]:
    num_bytes = CHECK_GPU_BYTES if worker.device.type == "cuda" else CHECK_CPU_BYTES
    numbers = torch.ones(num_bytes // 4, device=worker.device)
    try:
        dist.all_reduce(numbers)
        low, high = (value.item() for value in numbers.aminmax())
        numbers.zero_()
        best_s = min(_seconds(lambda: dist.all_reduce(numbers), worker))
    except RuntimeError as error:
        raise UserError(
            f"the ranks cannot add up a tensor: {str(error).splitlines()[0]}",
            expected=f"{worker.world_size} ranks that reach each other",
            fix="look at the other ranks' logs, then at the network between the nodes (NCCL_DEBUG=INFO says more)",
            code=ExitCode.UNEXPECTED,  # when a rank was killed, all others raise this: the kill is the cause
        ) from error
    if (low, high) != (worker.world_size, worker.world_size):
        raise UserError(
            f"the sum of ones over {worker.world_size} ranks came out as {low:g} to {high:g}",
            fix="a GPU or network card is broken: start the job on other machines",
            code=ExitCode.UNAVAILABLE,
        )
    speed = Speed("all ranks", worker.world_size, "all_reduce", num_bytes, best_s)
    return {"bytes": num_bytes, "seconds": best_s, "bus_gb_per_s": speed.bus_gb_per_s}


def measure_communication(run_uri: str, worker: ProcessContext) -> list[Speed]:
    """Time the collectives that strategies use, print a table and write `<run>/communication.json`. Collective.

    Takes seconds, and memory of up to twice the largest size.
    """
    if worker.world_size == 1:
        print("communication: one rank, nothing to measure", flush=True)
        return []
    sizes = GPU_SIZES_BYTES if worker.device.type == "cuda" else CPU_SIZES_BYTES
    speeds = [
        Speed(among, len(ranks), collective, size, seconds)
        for among, groups in _groups(worker).items()
        for ranks, times in [_in_my_group(groups, worker, sizes)]
        for (collective, size), seconds in times.items()
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
    group, _ = dist.new_subgroups_by_enumeration(groups)
    ranks = next(ranks for ranks in groups if worker.rank in ranks)
    cases = [(collective, size) for collective in PASSES for size in sizes]
    medians = [statistics.median(_seconds(_work(*case, len(ranks), group, worker), worker)) for case in cases]
    slowest = torch.tensor(medians, dtype=torch.float64, device=worker.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    dist.destroy_process_group(group)  # frees its buffers on the GPU
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


def _seconds(work: Callable[[], object], worker: ProcessContext) -> list[float]:
    """Times of calls after warm-up calls that open connections."""

    def once() -> float:
        dist.barrier()
        if worker.device.type == "cuda":
            torch.cuda.synchronize()
        started_s = time.perf_counter()
        work()
        if worker.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started_s

    return [once() for _ in range(WARM_UPS + REPETITIONS)][WARM_UPS:]


def _table(speeds: list[Speed]) -> list[str]:
    head = f"communication: {'among':<22} {'ranks':>5} {'collective':<14} {'MiB':>8} {'ms':>10} {'bus GB/s':>9}"
    return [head] + [
        f"communication: {speed.among:<22} {speed.ranks:>5} {speed.collective:<14} "
        f"{speed.bytes / MIB:>8.4g} {1000 * speed.seconds:>10.3f} {speed.bus_gb_per_s:>9.2f}"
        for speed in speeds
    ]
