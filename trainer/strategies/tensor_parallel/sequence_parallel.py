"""Sequence parallelism (Korthikanti et al. 2022, arXiv 2205.05198) for language layers under tensor parallelism.

Norms and residual sums work on single tokens, so each tensor-parallel rank computes them for its share of the tokens.
Each all-reduce becomes a reduce-scatter, and the inputs of attention and MLP are all-gathered: the same bytes in total.
Attention sees whole sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from vlmpipe.trainer.strategies.tensor_parallel.styles import ShardingStyle, mark_input, sum_output

# torch 2.13 gives these other names and warns of the old ones.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


@dataclass(frozen=True)
class SequenceParallel:
    """Shards hidden states (sequences, tokens, hidden) into (sequences, tokens / ranks, hidden) per rank.

    The shards are cut from the flattened tokens, so each is contiguous; which tokens a rank holds does not matter.
    """

    ranks: int
    number: int = 0  # this rank's
    group: ProcessGroup | None = None  # None traces one rank alone: gathered values are uninitialised

    @classmethod
    def of(cls, mesh: DeviceMesh) -> SequenceParallel:
        return cls(mesh.size(), mesh.get_local_rank(), mesh.get_group())

    def shard(self, whole: Tensor) -> Tensor:
        """A copy of this rank's shard."""
        sequences, tokens, hidden = whole.shape
        part = whole.reshape(-1, hidden).chunk(self.ranks)[self.number]
        return part.clone().view(sequences, tokens // self.ranks, hidden)

    def gathered(self, part: Tensor) -> Tensor:
        """All-gather."""
        sequences, tokens, hidden = part.shape
        whole = part.new_empty(sequences, tokens * self.ranks, hidden)
        if self.group:
            _all_gather(whole.view(-1, hidden), part.reshape(-1, hidden).contiguous(), group=self.group)
        return whole

    def summed(self, whole: Tensor) -> Tensor:
        """Reduce-scatter."""
        sequences, tokens, hidden = whole.shape
        part = whole.new_empty(sequences, tokens // self.ranks, hidden)
        if self.group:
            _reduce_scatter(part.view(-1, hidden), whole.reshape(-1, hidden).contiguous(), group=self.group)
        return part


class GatheredInput(ShardingStyle):
    """All-gathers the input of a module around sharded ones."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return self._gather(module, SequenceParallel.of(device_mesh))

    def cut(self, module: nn.Module, ranks: int) -> None:
        self._gather(module, SequenceParallel(ranks))

    def _gather(self, module: nn.Module, shares: SequenceParallel) -> nn.Module:
        # Cast to the compute type first, as the products would do: half the bytes in bf16.
        return mark_input(module, lambda hidden: _gathered(_in_compute_type(hidden), shares))


class ScatteredOutput(ShardingStyle):
    """Reduce-scatters a module's output. See `ReduceFromModelParallelRegion`."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        shares = SequenceParallel.of(device_mesh)
        return sum_output(module, lambda part: _summed(part, shares))

    def cut(self, module: nn.Module, ranks: int) -> None:
        module.register_forward_hook(lambda _module, _args, output: _summed(output, SequenceParallel(ranks)))


def scatter_sequence(first: nn.Module, last: nn.Module, shares: SequenceParallel) -> None:
    """Shard tokens from the replicated input of layer `first` to the replicated output of layer `last`."""
    mark_input(first, lambda hidden: _sharded(hidden, shares))
    last.register_forward_hook(lambda _module, _args, output: _all(output, shares))


def _in_compute_type(hidden: Tensor) -> Tensor:
    device = hidden.device.type
    return hidden.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else hidden


class _Context(Protocol):
    """Context that autograd passes from the forward to the backward pass."""

    back: Callable[[Tensor], Tensor]


class _Moved(torch.autograd.Function):
    """Applies `forth` to a tensor and `back` to its gradient."""

    @staticmethod
    def forward(
        ctx: _Context, tensor: Tensor, forth: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.back = back
        return forth(tensor)

    @staticmethod
    def backward(ctx: _Context, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(gradient), None, None


def _gathered(part: Tensor, shares: SequenceParallel) -> Tensor:
    """All-gather; each rank computes a part of the gradient, which is reduce-scattered."""
    return _Moved.apply(part, shares.gathered, shares.summed)


def _summed(summand: Tensor, shares: SequenceParallel) -> Tensor:
    """Reduce-scatter; the gradient is all-gathered."""
    return _Moved.apply(summand, shares.summed, shares.gathered)


def _sharded(whole: Tensor, shares: SequenceParallel) -> Tensor:
    """Shard a replicated tensor; the gradient is all-gathered."""
    return _Moved.apply(whole, shares.shard, shares.gathered)


def _all(part: Tensor, shares: SequenceParallel) -> Tensor:
    """All-gather; the gradient is replicated, and each rank takes its shard."""
    return _Moved.apply(part, shares.gathered, shares.shard)
