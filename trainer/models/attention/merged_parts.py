"""Attention in parts: causal attention inside samples, and further queries with further keys, merged by log-sum-exp.

A part's output counts by the share of its scores in the sum of all. In the backward pass each kernel gets the merged
output and the merged log-sum-exp: the scores less that are the true shares, so the gradients of the parts add up, and
no kernel needs a gradient of its log-sum-exp, which those of GPUs leave out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vlmpipe.trainer.models.attention.kernels import Kernel, KeyBounds, VarlenArgs


@dataclass(frozen=True)
class Part:
    """Queries and keys in addition to those of causal attention. A query has one place in a part, at most."""

    queries: Tensor  # (tokens,) their places in the flattened sequences
    keys: Tensor  # likewise
    bounds: Tensor  # of the gathered queries; this and the next: see `CuSeqlens`
    device_bounds: Tensor
    of_keys: KeyBounds | None  # None: causal among the gathered ones

    def inputs(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(1, tokens, heads, head_dim) each."""
        return _at(query, self.queries), _at(key, self.keys), _at(value, self.keys)

    def args(self, scale: float) -> VarlenArgs:
        """Windows say nothing of parts."""
        return VarlenArgs(self.bounds, self.device_bounds, scale, keys=self.of_keys)


def with_parts(kernel: Kernel, parts: Sequence[Part]) -> Kernel:
    """The kernel with these parts in the sight of their queries."""
    if not parts:
        return kernel

    def forward(query: Tensor, key: Tensor, value: Tensor, args: VarlenArgs) -> tuple[Tensor, Tensor]:
        output, lse = kernel.forward(query, key, value, args)
        flat = output.flatten(0, 1)
        for part in parts:
            added, logs = kernel.forward(*part.inputs(query, key, value), part.args(args.scale))
            before = lse.index_select(1, part.queries)
            both = torch.logaddexp(before, logs)
            shares = [
                (logs_of_part - both).exp().T.unsqueeze(-1) for logs_of_part in (before, logs)
            ]  # (tokens, heads, 1)
            merged = flat.index_select(0, part.queries) * shares[0] + added[0] * shares[1]
            flat.index_copy_(0, part.queries, merged.to(flat.dtype))
            lse.index_copy_(1, part.queries, both)
        return flat.view(output.shape), lse

    def backward(
        gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, args: VarlenArgs
    ) -> tuple[Tensor, Tensor, Tensor]:
        gradients = kernel.backward(gradient, query, key, value, output, lse, args)
        for part in parts:
            computed = [_at(tensor, part.queries) for tensor in (gradient, output)]
            inputs, logs = part.inputs(query, key, value), lse.index_select(1, part.queries)
            added = kernel.backward(computed[0], *inputs, computed[1], logs, part.args(args.scale))
            for whole, piece, places in zip(gradients, added, (part.queries, part.keys, part.keys), strict=True):
                whole.flatten(0, 1).index_add_(0, places, piece[0])
        return gradients

    return Kernel(forward, backward)


def _at(tensor: Tensor, places: Tensor) -> Tensor:
    return tensor.flatten(0, 1).index_select(0, places).unsqueeze(0)
