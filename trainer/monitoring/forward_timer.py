"""Times forward passes on each rank, which shows stragglers where no rank waits for another.

A whole step shows nothing: in it all ranks wait for the slowest, and take the same time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

# The others send weights or activations in a forward pass, or have stages that differ.
WITHOUT_WAITS = ("ddp", "zero1", "zero2")


class ForwardTimer:
    """Adds up the seconds of a module's forward passes in training; of a GPU its own, by events, without waiting."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._seconds = 0.0
        self._on_gpu = device.type == "cuda"
        self._started: Any = None
        self._events: list[tuple[Any, Any]] = []
        module.register_forward_pre_hook(lambda *_: self._start())
        module.register_forward_hook(lambda *_: self._stop())

    def seconds(self) -> float:
        """Since this was made. Of a GPU it waits for the last forward pass."""
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
    """Of what each rank's timer said at two moments: the slowest rank, and its time in shares of the mean rank's.

    Nothing for one rank, or where nothing was timed.
    """
    spent = [after - before for before, after in zip(before_s, after_s, strict=True)]
    if len(spent) < 2 or not sum(spent):
        return {}
    slowest = max(range(len(spent)), key=spent.__getitem__)
    return {"straggler_spread": spent[slowest] * len(spent) / sum(spent), "slowest_rank": slowest}
