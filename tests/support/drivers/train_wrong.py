"""Trains runs on two ranks, each with a fault in one parameter's gradient or update, for tests of what compares runs.

python -m tests.support.drivers.train_wrong PARAMETER FAULT CONFIG [FAULT CONFIG ...]
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.distributed.process import StopRequest, run_worker, start_worker
from vlmpipe.trainer.loop import train
from vlmpipe.trainer.strategies import ddp, fsdp, torch_base

FACTOR = 1.01


def main() -> int:
    parameter, *pairs = sys.argv[1:]
    worker, stop = start_worker(), StopRequest()
    torch.use_deterministic_algorithms(True)
    for fault, config in zip(pairs[::2], pairs[1::2], strict=True):
        with FAULTS[fault](parameter):
            code = train(JobConfig.load(config), worker, stop)
        if code:
            return code
    return 0


def _local(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _scale(gradient: Tensor) -> None:
    gradient.mul_(FACTOR)


def _swap(gradient: Tensor) -> None:
    """Take the other rank's shard."""
    shards = [torch.empty_like(gradient) for _ in range(dist.get_world_size())]
    dist.all_gather(shards, gradient.contiguous())
    gradient.copy_(shards[1 - dist.get_rank()])


@contextlib.contextmanager
def _wrong_gradient(change: Callable[[Tensor], None], name: str) -> Iterator[None]:
    """Change the parameter's gradient once it is summed over ranks, before clipping."""
    clip_and_step = torch_base.clip_and_step

    def step(module: nn.Module, *arguments: Any, **named: Any) -> Any:
        change(_local(_parameter(module, name).grad))
        return clip_and_step(module, *arguments, **named)

    with patch.object(ddp, "clip_and_step", step), patch.object(fsdp, "clip_and_step", step):
        yield


@contextlib.contextmanager
def _wrong_rate(name: str) -> Iterator[None]:
    """Change the parameter by 1 % more in each step."""
    clip_and_step = torch_base.clip_and_step

    def step(module: nn.Module, *arguments: Any, **named: Any) -> Any:
        weight = _local(_parameter(module, name).detach())
        before = weight.clone()
        result = clip_and_step(module, *arguments, **named)
        weight.add_(weight - before, alpha=FACTOR - 1)
        return result

    with patch.object(ddp, "clip_and_step", step), patch.object(fsdp, "clip_and_step", step):
        yield


@contextlib.contextmanager
def _not_reduced(name: str) -> Iterator[None]:
    """DDP leaves the parameter out: each rank goes on with its own gradient."""

    class Partly(DistributedDataParallel):
        def __init__(self, module: nn.Module, **settings: Any) -> None:
            self._set_params_and_buffers_to_ignore_for_model(module, [name])
            super().__init__(module, **settings)

    with patch.object(ddp, "DistributedDataParallel", Partly):
        yield


def _parameter(module: nn.Module, name: str) -> nn.Parameter:
    return (module.module if isinstance(module, DistributedDataParallel) else module).get_parameter(name)


FAULTS: dict[str, Callable[[str], contextlib.AbstractContextManager[None]]] = {
    "none": contextlib.nullcontext,
    "scaled": lambda name: _wrong_gradient(_scale, name),
    "swapped": lambda name: _wrong_gradient(_swap, name),
    "not reduced": _not_reduced,
    "wrong rate": _wrong_rate,
}

if __name__ == "__main__":
    run_worker(main)
