"""Images whose tokens see each other, as Gemma's do, in attention by sample.

Causal attention lacks the later tokens of a token's own image. Those are causal attention too, of the image's tokens in
reverse order, each with the ones before its own place there; log-sum-exps weigh the two results. So any kernel serves,
and no mask is made.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from torch import Tensor

from vlmpipe.trainer.models.attention.cu_seqlens import BOUNDS_BY, CuSeqlens
from vlmpipe.trainer.models.attention.kernels import Kernel
from vlmpipe.trainer.models.attention.merged_parts import Part, with_parts

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
    return Part(queries.to(device), (queries + 1).to(device), samples.bounds, samples.device_bounds, None)
