"""Sequence parallelism: between sharded parts of language layers, each rank holds a share of the tokens.

Norms and sums with the residual stream work on each token by itself, so ranks that split a layer need not do them all.
A sum over ranks becomes a reduce-scatter, and what attention and the feed-forward part take is gathered before: as many
bytes as the sum had (Korthikanti et al. 2022, arXiv 2205.05198). Attention sees whole rows, packed or not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from trainer.strategies.tensor_parallel.styles import PartialSum, ShardingStyle, mark_input, sum_output

# torch 2.13 gives these other names and warns of the old ones.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


@dataclass(frozen=True)
class SequenceParallel:
    """The shares of `ranks` ranks in hidden states (rows, tokens, hidden): each (rows, tokens / ranks, hidden).

    Cut from the rows laid end to end, so that shares lie in one piece whatever the number of rows: which tokens a rank
    has makes no difference.
    """

    ranks: int
    number: int = 0  # this rank's
    group: ProcessGroup | None = None  # None: there are no others, and nothing is known of their shares

    @classmethod
    def of(cls, mesh: DeviceMesh) -> SequenceParallel:
        return cls(mesh.size(), mesh.get_local_rank(), mesh.get_group())

    def own(self, whole: Tensor) -> Tensor:
        """This rank's share, by itself in memory."""
        rows, tokens, hidden = whole.shape
        part = whole.reshape(-1, hidden).chunk(self.ranks)[self.number]
        return part.clone().view(rows, tokens // self.ranks, hidden)

    def gathered(self, part: Tensor) -> Tensor:
        """All shares."""
        rows, tokens, hidden = part.shape
        whole = part.new_empty(rows, tokens * self.ranks, hidden)
        if self.group:
            _all_gather(whole.view(-1, hidden), part.reshape(-1, hidden).contiguous(), group=self.group)
        return whole

    def summed(self, whole: Tensor) -> Tensor:
        """This rank's share of the sum over ranks."""
        rows, tokens, hidden = whole.shape
        part = whole.new_empty(rows, tokens // self.ranks, hidden)
        if self.group:
            _reduce_scatter(part.view(-1, hidden), whole.reshape(-1, hidden).contiguous(), group=self.group)
        return part


class GatheredInput(ShardingStyle):
    """A module around split ones: all ranks give it their shares, and it takes the whole."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return self._gather(module, SequenceParallel.of(device_mesh))

    def cut(self, module: nn.Module, ranks: int) -> None:
        self._gather(module, SequenceParallel(ranks))

    def _gather(self, module: nn.Module, shares: SequenceParallel) -> nn.Module:
        # In the type that products compute in: they would cast it anyway, and it is half the bytes.
        return mark_input(module, lambda hidden: _gathered(_in_compute_type(hidden), shares))


class ScatteredOutput(ShardingStyle):
    """A module whose output is summed over ranks, each of which has its share of the sum. See
    `ReduceFromModelParallelRegion`."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        shares = SequenceParallel.of(device_mesh)
        return sum_output(module, lambda part: _summed(part, shares))

    def cut(self, module: nn.Module, ranks: int) -> None:
        module.register_forward_hook(lambda _module, _args, output: _summed(output, SequenceParallel(ranks)))


class ScatteredInputs(PartialSum):
    """A linear layer that takes what each rank has: (..., inputs of this rank) -> its share of the outputs."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return ScatteredOutput()._apply(super()._apply(module, device_mesh), device_mesh)

    def cut(self, module: nn.Module, ranks: int) -> None:
        super().cut(module, ranks)
        ScatteredOutput().cut(module, ranks)


def scatter_sequence(first: nn.Module, last: nn.Module, shares: SequenceParallel) -> None:
    """From the input of layer `first`, which is equal on all ranks, to the output of layer `last`, which is again."""
    mark_input(first, lambda hidden: _own(hidden, shares))
    last.register_forward_hook(lambda _module, _args, output: _all(output, shares))


def _in_compute_type(hidden: Tensor) -> Tensor:
    device = hidden.device.type
    return hidden.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else hidden


class _Moved(torch.autograd.Function):
    """What `forth` makes of a tensor, and of its gradient `back`."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, forth: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.back = back
        return forth(given)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(gradient), None, None


def _gathered(part: Tensor, shares: SequenceParallel) -> Tensor:
    """Shares to the whole. Each rank has a part of the whole's gradient: all are summed."""
    return _Moved.apply(part, shares.gathered, shares.summed)


def _summed(summand: Tensor, shares: SequenceParallel) -> Tensor:
    """Summands to a share of their sum, whose gradient is that of each summand."""
    return _Moved.apply(summand, shares.summed, shares.gathered)


def _own(whole: Tensor, shares: SequenceParallel) -> Tensor:
    """What is equal on all ranks to their shares."""
    return _Moved.apply(whole, shares.own, shares.gathered)


def _all(part: Tensor, shares: SequenceParallel) -> Tensor:
    """Shares to the whole, whose gradient all ranks know."""
    return _Moved.apply(part, shares.gathered, shares.own)
