"""Exponential moving average of the trained weights (`train.ema_decay`), of this rank's shards, in fp32."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

SWAPPED_NUMBERS = 1 << 24  # at a time: what swapping takes of memory


class Ema:
    """average <- decay x average + (1 - decay) x weight, after each update; the first average is the first weight.

    Each rank averages its own slices, so nothing is sent. `averages` are placed as `weights` are, or where `copied`
    puts its copies.
    """

    def __init__(
        self, weights: Sequence[Tensor], decay: float, copied: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self._weights = list(weights)
        copied = copied or torch.clone
        self.averages = [copied(weight.detach()) for weight in self._weights]
        self._follow = get_ema_multi_avg_fn(decay)

    def update(self) -> None:
        """Follow the weights. After an update that was made, not after one that was skipped."""
        if self._weights:  # a pipeline stage may have nothing to train
            self._follow(_local(self.averages), _local(self._weights), None)

    @torch.no_grad()
    def restart(self, source: str) -> None:
        """Begin with the weights that were loaded from `source`, which holds no average, and say so."""
        for average, weight in zip(_local(self.averages), _local(self._weights), strict=True):
            average.copy_(weight)
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(f"train: {source} holds no average of the weights: it begins with the weights themselves", flush=True)

    @contextlib.contextmanager
    def swapped(self) -> Iterator[None]:
        """The weights are the averages in here, and bit for bit what they were afterwards."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for average, weight in zip(_local(self.averages), _local(self._weights), strict=True):
            rows = max(1, SWAPPED_NUMBERS // max(1, weight[:1].numel())) if weight.ndim else 1
            pairs = zip(torch.atleast_1d(average).split(rows), torch.atleast_1d(weight).split(rows), strict=True)
            for of_average, of_weight in pairs:
                held = of_weight.clone()
                of_weight.copy_(of_average)
                of_average.copy_(held)


def _local(tensors: Sequence[Tensor]) -> list[Tensor]:
    """This rank's own part of each."""
    found = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return [tensor.detach() for tensor in found]
