"""Images whose tokens see each other, as Gemma's do, in attention by sample.

Causal attention lacks the later tokens of a token's own image. Those are causal attention too, of the image's tokens in
reverse order, each with the ones before its own place there; log-sum-exps weigh the two results. So any kernel serves,
and no mask is made.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vlmpipe.trainer.models.attention.cu_seqlens import BOUNDS_BY, CuSeqlens
from vlmpipe.trainer.models.attention.kernels import Kernel, VarlenArgs

Spans = tuple[tuple[int, int], ...]  # first token and end of each image


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


@dataclass(frozen=True)
class _Later:
    """Queries and keys of images in reverse order: the last token sees none, and no token sees the first one."""

    queries: Tensor  # (tokens,) their places in the flattened sequences
    keys: Tensor
    samples: CuSeqlens


def with_image_blocks(kernel: Kernel, blocks: Tensor | None) -> Kernel:
    """The kernel with the later tokens of each image in its tokens' sight. blocks: see `CuSeqlens.image_blocks`."""
    spans = () if blocks is None else tuple((first, end) for first, end in blocks.tolist() if end - first > 1)
    if not spans:
        return kernel

    def forward(query: Tensor, key: Tensor, value: Tensor, args: VarlenArgs) -> tuple[Tensor, Tensor]:
        output, lse = kernel.forward(query, key, value, args)
        later = _later(spans, query.device)
        later_output, logs = kernel.forward(*_of(later, query, key, value), _args(later, args))
        before = lse.index_select(1, later.queries)
        both = torch.logaddexp(before, logs)
        flat = output.flatten(0, 1)
        shares = [(part - both).exp().T.unsqueeze(-1) for part in (before, logs)]  # (tokens, heads, 1)
        merged = flat.index_select(0, later.queries) * shares[0] + later_output[0] * shares[1]
        flat.index_copy_(0, later.queries, merged.to(flat.dtype))
        lse.index_copy_(1, later.queries, both)
        return flat.view(output.shape), lse

    def backward(
        gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, args: VarlenArgs
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Each part's scores, less the log-sum-exp of both, are its shares of the whole, with their gradients."""
        gradients = kernel.backward(gradient, query, key, value, output, lse, args)
        later = _later(spans, query.device)
        d_output, computed = _at(gradient, later.queries), _at(output, later.queries)
        logs = lse.index_select(1, later.queries)
        inputs = _of(later, query, key, value)
        parts = kernel.backward(d_output, *inputs, computed, logs, _args(later, args))
        for whole, part, places in zip(gradients, parts, (later.queries, later.keys, later.keys), strict=True):
            whole.flatten(0, 1).index_add_(0, places, part[0])
        return gradients

    return Kernel(forward, backward)


def _of(later: _Later, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(1, tokens, heads, head_dim) each."""
    return _at(query, later.queries), _at(key, later.keys), _at(value, later.keys)


def _at(tensor: Tensor, places: Tensor) -> Tensor:
    return tensor.flatten(0, 1).index_select(0, places).unsqueeze(0)


def _args(later: _Later, args: VarlenArgs) -> VarlenArgs:
    """Windows say nothing of later tokens."""
    return VarlenArgs(later.samples.bounds, later.samples.device_bounds, args.scale)


@functools.lru_cache(maxsize=4)  # all layers of a forward pass and its backward pass ask for the same
def _later(spans: Spans, device: torch.device) -> _Later:
    queries = torch.cat([torch.arange(end - 2, first - 1, -1) for first, end in spans])
    lengths = [end - first - 1 for first, end in spans]
    samples = CuSeqlens.of([lengths], len(queries))
    return _Later(queries.to(device), (queries + 1).to(device), samples.to(device))
