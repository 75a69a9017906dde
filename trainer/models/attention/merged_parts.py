"""Attention in parts: causal attention inside samples, and further queries with further keys, merged by log-sum-exp.

A part's output counts by the share of its scores in the sum of all. In the backward pass each kernel gets the merged
output and the merged log-sum-exp: the scores less that are the true shares, so the gradients of the parts add up, and
no kernel needs a gradient of its log-sum-exp, which those of GPUs leave out. So any kernel serves, and no mask is made.

Images whose tokens see each other, as Gemma's do, lack the later tokens of a token's own image: causal attention too,
of the image's tokens in reverse order, each with the ones before its own place there.

Of a prefix that samples share, its branches, the rest of each of its samples, lack all of it. That is one rectangle,
the tokens of all branches with the prefix, so no key is repeated. Prefixes may stand in branches of others.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vlmpipe.trainer.models.attention.cu_seqlens import BOUNDS_BY, CuSeqlens
from vlmpipe.trainer.models.attention.kernels import Kernel, VarlenArgs

Spans = tuple[tuple[int, ...], ...]  # first token and end of each image; of each prefix, and the end of its branches


@dataclass(frozen=True)
class Part:
    """Queries and keys in addition to those of causal attention. A query has one place in a part, at most."""

    queries: Tensor  # (tokens,) their places in the flattened sequences
    keys: Tensor  # likewise
    pieces: CuSeqlens  # of the gathered queries
    of_keys: CuSeqlens | None  # None: causal among the gathered ones

    def inputs(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(1, tokens, heads, head_dim) each."""
        return _at(query, self.queries), _at(key, self.keys), _at(value, self.keys)

    def args(self, scale: float) -> VarlenArgs:
        """Windows say nothing of parts."""
        return VarlenArgs(self.pieces.bounds, self.pieces.device_bounds, scale, keys=self.of_keys)


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
            first, second = ((log - both).exp().T.unsqueeze(-1) for log in (before, logs))  # shares: (tokens, heads, 1)
            merged = flat.index_select(0, part.queries) * first + added[0] * second
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


def image_blocks(is_image: Tensor, samples: CuSeqlens, *, windows_only: bool) -> CuSeqlens:
    """The samples with their images' tokens, runs of `is_image` (sequences, tokens), which is on the host.

    windows_only: tokens of an image see each other in layers with windows only.
    """
    flat = is_image.flatten().int()
    starts = samples.bounds[:, 0].long().unique()
    starts = starts[starts < len(flat)]
    before = torch.cat([flat.new_zeros(1), flat[:-1]])
    before[starts] = 0  # an image at a sample's end and one at the next sample's start are two
    first = (flat > before).nonzero().flatten()
    after = torch.cat([flat[1:], flat.new_zeros(1)])
    after[starts[starts > 0] - 1] = 0
    end = (flat > after).nonzero().flatten() + 1
    blocks = torch.stack([first, end], 1).int()
    filler = blocks.new_zeros(-len(blocks) % BOUNDS_BY, 2)
    return replace(samples, image_blocks=torch.cat([blocks, filler]), blocks_in_windows_only=windows_only)


def with_image_blocks(kernel: Kernel, blocks: Tensor | None, device: torch.device) -> Kernel:
    """The kernel with the later tokens of each image in its tokens' sight. blocks: see `CuSeqlens.image_blocks`."""
    spans = () if blocks is None else tuple((first, end) for first, end in blocks.tolist() if end - first > 1)
    return with_parts(kernel, [_later(spans, device)]) if spans else kernel


@functools.lru_cache(maxsize=4)  # all layers of a forward pass and its backward pass ask for the same
def _later(spans: Spans, device: torch.device) -> Part:
    """Queries and keys of images in reverse order: the last token sees none, and no token sees the first one."""
    queries = torch.cat([torch.arange(end - 2, first - 1, -1) for first, end in spans])
    lengths = [end - first - 1 for first, end in spans]
    samples = CuSeqlens.of([lengths], len(queries)).to(device)
    return Part(queries.to(device), (queries + 1).to(device), samples, None)


def with_prefixes(kernel: Kernel, prefixes: Tensor | None, device: torch.device) -> Kernel:
    """The kernel with each prefix in the sight of its branches. prefixes: see `CuSeqlens.prefixes`."""
    spans = () if prefixes is None else tuple((a, b, c) for a, b, c in prefixes.tolist() if a < b < c)
    return with_parts(kernel, _branches(spans, device)) if spans else kernel


@functools.lru_cache(maxsize=4)  # all layers of a forward pass and its backward pass ask for the same
def _branches(spans: Spans, device: torch.device) -> list[Part]:
    """A part for each depth of prefixes: of one depth, no two have branches in common."""
    parts: list[Part] = []
    left = sorted(spans)
    while left:
        level, stop = [], 0
        for span in left:
            if span[0] >= stop:
                level.append(span)
                stop = span[2]
        left = [span for span in left if span not in level]
        parts.append(_part(level, device))
    return parts


def _part(level: Sequence[tuple[int, ...]], device: torch.device) -> Part:
    queries = _places([(end, stop) for _, end, stop in level])
    keys = _places([(start, end) for start, end, _ in level])
    pieces = CuSeqlens.of([[stop - end for _, end, stop in level]], len(queries)).to(device)
    of_keys = CuSeqlens.of([[end - start for start, end, _ in level]], len(keys)).to(device)
    return Part(queries.to(device), keys.to(device), pieces, of_keys)


def _places(spans: Sequence[tuple[int, int]]) -> Tensor:
    return torch.cat([torch.arange(start, stop) for start, stop in spans])
