"""Prefixes that samples of a packed sequence share, in attention by sample.

A group is a prefix, which is there once, and its branches behind it: the rest of each of its samples. Bounds are those
of prefixes and branches, so causal attention inside them lacks what a branch sees of its prefix: all of it. That is one
rectangle a group, the tokens of all branches with the prefix, so no key is repeated. Prefixes may stand in branches of
others.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from vlmpipe.trainer.models.attention.cu_seqlens import CuSeqlens
from vlmpipe.trainer.models.attention.kernels import Kernel, KeyBounds
from vlmpipe.trainer.models.attention.merged_parts import Part, with_parts

Spans = tuple[tuple[int, int, int], ...]  # first token of each prefix, its end, and the end of its branches


def with_prefixes(kernel: Kernel, prefixes: Tensor | None, device: torch.device) -> Kernel:
    """The kernel with each prefix in the sight of its branches. prefixes: see `CuSeqlens.prefixes`."""
    spans = () if prefixes is None else tuple((a, b, c) for a, b, c in prefixes.tolist() if a < b < c)
    return with_parts(kernel, _parts(spans, device)) if spans else kernel


@functools.lru_cache(maxsize=4)  # all layers of a forward pass and its backward pass ask for the same
def _parts(spans: Spans, device: torch.device) -> list[Part]:
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


def _part(level: Sequence[tuple[int, int, int]], device: torch.device) -> Part:
    queries = _places([(end, stop) for _, end, stop in level])
    keys = _places([(start, end) for start, end, _ in level])
    bounds = CuSeqlens.of([[stop - end for _, end, stop in level]], len(queries)).to(device)
    of_keys = CuSeqlens.of([[end - start for start, end, _ in level]], len(keys)).to(device)
    seen = KeyBounds(of_keys.bounds, of_keys.device_bounds)
    return Part(queries.to(device), keys.to(device), bounds.bounds, bounds.device_bounds, seen)


def _places(spans: Sequence[tuple[int, int]]) -> Tensor:
    return torch.cat([torch.arange(start, stop) for start, stop in spans])
