"""Exponential moving average of this rank's trained weights, in fp32 (`train.ema_decay`)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from vlmpipe.trainer.config.train import TrainConfig
from vlmpipe.trainer.hooks.feature import Feature

SWAPPED_NUMBERS = 1 << 24  # swapped at a time, which bounds the extra memory
MAX_START_SHARE = 0.05  # share of initial weights in the average at the end of training that is worth a warning


class Averaging(Feature):
    """Keeps an `Ema` of the trained weights."""

    def warnings(self, train: TrainConfig, total_steps: int) -> Iterator[str]:
        """Warn about an average whose decay is too high for the number of steps."""
        left = train.ema_decay**total_steps
        if left >= MAX_START_SHARE:
            yield (
                f"train.ema_decay {train.ema_decay:g}: after all {total_steps} steps the exported average is "
                f"still {left:.0%} initial weights; lower train.ema_decay"
            )

    def average(self, train: TrainConfig, weights: Callable[[], Sequence[Tensor]]) -> Ema:
        return Ema(weights(), train.ema_decay)


class Ema:
    """average <- decay x average + (1 - decay) x weight after each update, starting from the first weights.

    A `WeightsAverage`. Each rank averages its own shards without communication.
    """

    def __init__(self, weights: Sequence[Tensor], decay: float) -> None:
        self._weights = list(weights)
        self.averages = [weight.detach().clone() for weight in self._weights]
        self._follow = get_ema_multi_avg_fn(decay)

    def update(self) -> None:
        """Average in the new weights. Not after a skipped step."""
        if self._weights:  # a pipeline stage may have nothing to train
            self._follow(_local(self.averages), _local(self._weights), None)

    @torch.no_grad()
    def restart(self, source: str) -> None:
        """Start from the weights loaded from `source`, which holds no average, and print that."""
        for average, weight in zip(_local(self.averages), _local(self._weights), strict=True):
            average.copy_(weight)
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(f"train: {source} holds no average of the weights: it begins with the weights themselves", flush=True)

    @contextlib.contextmanager
    def swapped(self) -> Iterator[None]:
        """Use the averages as weights inside this context; the weights are restored bit for bit."""
        self._swap()
        try:
            yield
        finally:
            if torch.cuda.is_available():  # with train.offload the device may still have to copy them from the host
                torch.cuda.synchronize()
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
    """This rank's shard of each."""
    shards = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return [tensor.detach() for tensor in shards]


FEATURE = Averaging()
