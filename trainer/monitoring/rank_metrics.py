"""Metrics of each rank: peak memory, waiting, gauges of its GPU, and forward time, which shows stragglers.

Whole steps take the same time on all ranks, because all wait for the slowest.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from vlmpipe.trainer.distributed.process import ProcessContext
from vlmpipe.trainer.monitoring.gpu_telemetry import NOTHING, GpuReading
from vlmpipe.trainer.storage.bucket import REQUESTS

if TYPE_CHECKING:
    from vlmpipe.trainer.config.train import TrainConfig
    from vlmpipe.trainer.models.base import ShardingUnits

GIB = 1 << 30

# By strategy: what a rank computes without waiting for another. Ranks of the others wait within layers: for a linear
# layer's weights (zero3), for sums (tensor parallelism), for keys and values (context parallelism).
WAITLESS_MODULE = ("ddp", "zero1", "zero2")
WAITLESS_LAYERS = ("fsdp", "hsdp")  # whose weights are gathered before the layer begins


def waitless(config: TrainConfig, module: nn.Module, units: ShardingUnits, *, compiled: bool) -> list[nn.Module]:
    """The modules whose forward passes are timed on each rank to find stragglers.

    Where ranks wait within layers, one linear layer of each language layer, if `compiled` is false: within a compiled
    layer nothing can be timed.
    """
    if config.context_parallel == 1 and config.strategy in WAITLESS_MODULE:
        return [module]
    if config.context_parallel == 1 and config.strategy in WAITLESS_LAYERS:
        return [*units.tower_layers, *units.language_layers]
    return [] if compiled else [linear for layer in units.language_layers for linear in _widest_linear(layer)]


def _widest_linear(layer: nn.Module) -> list[nn.Module]:
    """The layer's largest linear layer that does not narrow, which tensor parallelism splits by outputs: no rank waits
    in it. None of an expert's, to which ranks send different numbers of tokens."""
    linears = [
        module
        for name, module in layer.named_modules()
        if isinstance(module, nn.Linear) and module.out_features >= module.in_features
        if ".experts." not in f".{name}."
    ]
    return sorted(linears, key=lambda linear: linear.out_features * linear.in_features)[-1:]


class ForwardTimer:
    """Adds up the seconds of modules' forward passes in training; on a GPU by events, without synchronizing.

    Must be made after the strategy: hooks of FSDP and DeepSpeed, which gather weights, are to run before the clock
    starts.
    """

    def __init__(self, modules: Sequence[nn.Module], device: torch.device) -> None:
        self._seconds = 0.0
        self._on_gpu = device.type == "cuda"
        self._started: float | torch.cuda.Event | None = None
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._ran: set[nn.Module] = set()
        for module in modules:
            module.register_forward_pre_hook(lambda *_: self._start())
            module.register_forward_hook(lambda hooked, *_: self._stop(hooked))

    def seconds(self) -> float:
        """Total so far, by the number of modules that this rank runs: pipeline parallel ranks have different ones.
        On a GPU, waits for the last forward pass."""
        for start, end in self._events:
            end.synchronize()
            self._seconds += start.elapsed_time(end) / 1000
        self._events = []
        return self._seconds / max(1, len(self._ran))

    def _start(self) -> None:
        if torch.is_grad_enabled():  # it is off in validation
            self._started = self._now()

    def _stop(self, module: nn.Module) -> None:
        started, self._started = self._started, None
        if started is None:
            return
        self._ran.add(module)
        stopped = self._now()
        if isinstance(started, torch.cuda.Event) and isinstance(stopped, torch.cuda.Event):
            self._events.append((started, stopped))
        elif isinstance(started, float) and isinstance(stopped, float):
            self._seconds += stopped - started

    def _now(self) -> float | torch.cuda.Event:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def straggler(before_s: Sequence[float], after_s: Sequence[float]) -> dict[str, float]:
    """The slowest rank between two readings of all timers, and its time as a multiple of the mean.

    Empty where fewer than two ranks were timed: one with a part of the tower only has none of the modules.
    """
    spent = [after - before for before, after in zip(before_s, after_s, strict=True)]
    timed = sum(seconds > 0 for seconds in spent)
    if timed < 2:
        return {}
    slowest = max(range(len(spent)), key=spent.__getitem__)
    return {"straggler_spread": spent[slowest] * timed / sum(spent), "slowest_rank": slowest}


class StragglerWatch:
    """Says when one rank has stayed slow: the lines that name the same rank, one after another."""

    SPREAD, LINES = 1.2, 5  # a fifth over the mean; one slow line is a pause, five in a row are a machine

    def __init__(self) -> None:
        self._rank, self._lines = -1, 0

    def note(self, spreads: dict[str, float]) -> str:
        """A warning for the line that `straggler` gave, or ""; once for each time that a rank becomes slow."""
        spread, rank = spreads.get("straggler_spread", 0.0), int(spreads.get("slowest_rank", -1))
        if spread < self.SPREAD:
            rank = -1
        self._lines = self._lines + 1 if rank == self._rank else 1
        self._rank = rank
        if rank < 0 or self._lines != self.LINES:
            return ""
        return f"its forward passes take {spread:.2f} times the mean, and all ranks wait for it"


@dataclass(frozen=True)
class RankMetrics:
    """By rank, since training started."""

    peak_memory_gib: list[float]
    data_wait_s: list[float]
    forward_s: list[float]  # 0 where it is not timed
    num_reducers: list[float]  # reducers that the rank is connected to
    gpus: list[GpuReading]  # at this moment
    class_a: list[float]  # requests to buckets, see `RequestCounts`
    class_b: list[float]

    @classmethod
    def at_start(cls, world_size: int) -> RankMetrics:
        zeros = [0.0] * world_size
        return cls(zeros, zeros, zeros, zeros, [NOTHING] * world_size, zeros, zeros)

    def requests_since(self, before: RankMetrics) -> tuple[float, float]:
        """Requests of class A and of class B of all ranks since an earlier reading."""
        return sum(self.class_a) - sum(before.class_a), sum(self.class_b) - sum(before.class_b)


def gather_rank_metrics(
    worker: ProcessContext, data_wait_s: float, forward_s: float, num_reducers: int, gpu: GpuReading
) -> RankMetrics:
    """All ranks' metrics, given this rank's own. Collective."""
    requests = REQUESTS.class_a, REQUESTS.class_b
    values = [_peak_memory_bytes(worker) / GIB, data_wait_s, forward_s, num_reducers, *requests, *astuple(gpu)]
    local = torch.tensor(values, dtype=torch.float64, device=worker.device)
    gathered_ranks = [torch.empty_like(local) for _ in range(worker.world_size)]
    dist.all_gather(gathered_ranks, local)
    memory, waits, forward, reducers, class_a, class_b, *gauges = torch.stack(gathered_ranks).T.tolist()
    gpus = [GpuReading(*rank) for rank in zip(*gauges, strict=True)]
    return RankMetrics(memory, waits, forward, reducers, gpus, class_a, class_b)


def _peak_memory_bytes(worker: ProcessContext) -> int:
    """Most GPU memory that torch's allocator has reserved; on a CPU, this process's peak resident memory."""
    if worker.device.type == "cuda":
        return int(torch.cuda.max_memory_reserved(worker.device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
