"""Attention where ranks share the tokens of sequences, by all-to-all over heads (`train.context_parallel`).

DeepSpeed-Ulysses: Jacobs et al. 2023, arXiv 2309.14509. Each rank has tokens / ranks of all heads, and exchanges them
for all tokens of heads / ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.distributed.distributed_c10d import _resolve_process_group


@dataclass(frozen=True, eq=False)
class ContextParallel:
    """A group of ranks with the same sequences, whose flattened tokens are cut into a part for each."""

    ranks: int
    number: int = 0  # this rank's in its group
    group: str = ""  # name of the process group; traces with fake tensors need none

    def by_heads(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """(sequences, tokens / ranks, heads, head_dim) each -> (sequences, tokens, heads / ranks, head_dim).

        Queries, keys and values travel together. Key and value heads are repeated where there are fewer than ranks.
        """
        rows, tokens, _, width = query.shape
        repeats = self.ranks // math.gcd(self.ranks, key.shape[2])
        if repeats > 1:
            key, value = (tensor.repeat_interleave(repeats, dim=2) for tensor in (key, value))
        parts = [part.reshape(rows * tokens, self.ranks, -1, width).transpose(0, 1) for part in (query, key, value)]
        received = all_to_all(torch.cat(parts, dim=2), self.group)  # (ranks, rows x tokens, heads of this rank, width)
        whole = received.view(rows, tokens * self.ranks, -1, width)
        return list(whole.split([part.shape[2] for part in parts], dim=2))

    def by_tokens(self, output: Tensor) -> Tensor:
        """(sequences, tokens, heads / ranks, head_dim) -> (sequences, tokens / ranks, heads, head_dim)."""
        rows, tokens, heads, width = output.shape
        received = all_to_all(output.reshape(self.ranks, -1, heads, width), self.group)  # (ranks of heads, ...)
        return received.transpose(0, 1).reshape(rows, tokens // self.ranks, heads * self.ranks, width)


@torch.library.custom_op("vlmpipe::all_to_all", mutates_args=())
def all_to_all(parts: Tensor, group: str) -> Tensor:
    """(ranks, ...) -> (ranks, ...): part r goes to rank r of the process group of this name.

    To torch it is one operation, which compiled layers and traces handle.
    """
    name: Any = group  # a type of its own in torch 2.13
    received = torch.empty_like(parts, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, parts.contiguous(), group=_resolve_process_group(name))
    return received


@all_to_all.register_fake
def _(parts: Tensor, _group: str) -> Tensor:
    return parts.new_empty(parts.shape)


class _GroupContext(FunctionCtx):
    """Values saved for the backward pass."""

    group: str


def _save_group(ctx: _GroupContext, inputs: tuple[Tensor, str], output: Tensor) -> None:
    ctx.group = inputs[1]


def _backward(ctx: _GroupContext, gradient: Tensor) -> tuple[Tensor, None]:
    return all_to_all(gradient, ctx.group), None


all_to_all.register_autograd(_backward, setup_context=_save_group)
