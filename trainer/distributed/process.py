"""One process (rank) of a job: process group, stop requests and exit."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from vlmpipe.trainer.cpu_products import use_fastest_products
from vlmpipe.trainer.distributed.cluster_env import read_cluster
from vlmpipe.trainer.distributed.heartbeats import start_heart
from vlmpipe.trainer.errors import ExitCode, leave, run_main

COLLECTIVE_TIMEOUT = timedelta(minutes=10)  # of ranks that do the same work
# Of ranks whose work takes differently long, such as transfers of a node's first rank, and answers. That a rank has
# ended is noticed at once, and by heartbeats.py that its machine has vanished.
PATIENCE = timedelta(hours=6)
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
MAPPED_FROM_BYTES, KEPT_BYTES = 32 << 20, 1 << 30  # the first is glibc's limit


_PATIENT: WeakKeyDictionary[ProcessGroup, ProcessGroup] = WeakKeyDictionary()


@dataclass(frozen=True)
class ProcessContext:
    """This process's place in the job."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: torch.device
    num_reducers: int = 0  # of a Reduction Server

    @property
    def is_first(self) -> bool:
        """Return whether this is rank 0 of the job, which writes metrics and commits."""
        return self.rank == 0

    @property
    def is_node_leader(self) -> bool:
        """Return whether this is the first rank of its node, which transfers the node's files."""
        return self.local_rank == 0

    @property
    def node(self) -> int:
        return self.rank // self.local_world_size

    @property
    def num_nodes(self) -> int:
        return self.world_size // self.local_world_size


def start_worker(timeout: timedelta = COLLECTIVE_TIMEOUT, *, shares_gpus: bool = False) -> ProcessContext:
    """Join the process group of torchrun's variables; without them, start one of a single rank.

    timeout: of its collectives; those by which ranks agree have PATIENCE (`patient_group`).
    shares_gpus: the ranks of a node share all its GPUs, and `device` is the first of the rank's own (`own_devices`).
    """
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank * gpus_each() if shares_gpus else local_rank)
        torch.cuda.set_device(device)
    else:
        keep_freed_memory()
        use_fastest_products()
    # Objects and checkpoint plans travel on the CPU even on a GPU machine.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    alone: dict[str, Any] = {}
    if "MASTER_ADDR" not in os.environ:
        alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(backend, timeout=timeout, **alone)
    cluster = read_cluster(os.environ)
    reducers = cluster.num_reducers if cluster else 0
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    worker = ProcessContext(rank, world_size, local_rank, local_world_size, device, reducers)
    if worker.num_nodes > 1 and worker.is_node_leader:
        start_heart(worker.node, worker.num_nodes)
    return worker


def gpus_each() -> int:
    """GPUs of each rank where the ranks of a node share all."""
    return max(1, torch.cuda.device_count() // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


def own_devices(device: torch.device) -> list[torch.device]:
    """The GPUs of the rank whose first one is `device` (`start_worker` with shares_gpus), or the CPU."""
    if device.type != "cuda":
        return [device]
    first = device.index or 0
    return [torch.device("cuda", number) for number in range(first, first + gpus_each())]


def patient_group() -> ProcessGroup:
    """All ranks, for collectives that wait for hours. Collective when it is first called."""
    world = dist.group.WORLD
    assert world is not None, "there is no process group"
    if world not in _PATIENT:
        _PATIENT[world] = dist.new_group(backend="gloo", timeout=PATIENCE)
    return _PATIENT[world]


def keep_freed_memory() -> None:
    """Have glibc reuse the memory of freed tensors. By default it returns much of it, and the kernel spends 5 % of a
    step's CPU time on filling pages with zeros again.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if set_option:
        set_option(M_MMAP_THRESHOLD, MAPPED_FROM_BYTES)
        set_option(M_TRIM_THRESHOLD, KEPT_BYTES)


class StopRequest:
    """Remembers SIGTERM and SIGINT. The loop agrees with all ranks before it acts on them."""

    def __init__(self) -> None:
        self.requested = False
        self.requested_at: float | None = None  # time.monotonic()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._remember)

    def _remember(self, _signal: int, _frame: object) -> None:
        self.requested = True
        self.requested_at = self.requested_at or time.monotonic()


def run_worker(main: Callable[[], int | None]) -> None:
    """Run `main`, write the exit code for the launcher and end the process.

    It ends by `os._exit` because gloo's threads can abort a finished process at exit (pytorch#190489). After a clean
    run all ranks meet at a barrier first, so that none closes its connections while another still uses them.
    """
    gc.freeze()  # the modules that are loaded, which stay: no search for cycles goes through them
    code = run_main(main)
    if dist.is_initialized() and code in (ExitCode.OK, ExitCode.PREEMPTED):
        dist.barrier(group=patient_group())
        dist.destroy_process_group()
    leave(code)
