"""Times forward passes on each rank, to find stragglers where no rank waits for another.

Whole steps take the same time on all ranks, because all wait for the slowest.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

# The other strategies send weights or activations in a forward pass, or have different stages.
WITHOUT_WAITS = ("ddp", "zero1", "zero2")


class ForwardTimer:
    """Adds up the seconds of a module's forward passes in training; on a GPU by events, without synchronizing."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._seconds = 0.0
        self._on_gpu = device.type == "cuda"
        self._started: Any = None
        self._events: list[tuple[Any, Any]] = []
        module.register_forward_pre_hook(lambda *_: self._start())
        module.register_forward_hook(lambda *_: self._stop())

    def seconds(self) -> float:
        """Total so far. On a GPU, waits for the last forward pass."""
        for start, end in self._events:
            end.synchronize()
            self._seconds += start.elapsed_time(end) / 1000
        self._events = []
        return self._seconds

    def _start(self) -> None:
        if torch.is_grad_enabled():  # it is off in validation
            self._started = self._now()

    def _stop(self) -> None:
        started, self._started = self._started, None
        if started is None:
            return
        if self._on_gpu:
            self._events.append((started, self._now()))
        else:
            self._seconds += self._now() - started

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def straggler(before_s: Sequence[float], after_s: Sequence[float]) -> dict[str, float]:
    """The slowest rank between two readings of all timers, and its time as a multiple of the mean.

    Empty for one rank, or where nothing was timed.
    """
    spent = [after - before for before, after in zip(before_s, after_s, strict=True)]
    if len(spent) < 2 or not sum(spent):
        return {}
    slowest = max(range(len(spent)), key=spent.__getitem__)
    return {"straggler_spread": spent[slowest] * len(spent) / sum(spent), "slowest_rank": slowest}
