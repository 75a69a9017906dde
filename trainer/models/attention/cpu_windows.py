"""torch's fused attention of the CPU, whole or in windows: blocks of queries with the keys that some of them see."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

aten = torch.ops.aten
BLOCK = 128  # queries under one band

Block = tuple[slice, slice, Tensor]  # queries, keys, and what is added to their scores


def cpu_forward(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: int, causal: bool = True
) -> tuple[Tensor, Tensor]:
    """See `vlmpipe.trainer.models.attention.kernels._sample_by_sample`."""
    fused = aten._scaled_dot_product_flash_attention_for_cpu
    if not window or query.shape[2] <= window:
        output, lse = fused(query, key, value, 0.0, causal, scale=scale)  # no dropout
        return output, lse
    parts = [
        fused(query[:, :, queries], key[:, :, seen], value[:, :, seen], 0.0, False, attn_mask=band, scale=scale)
        for queries, seen, band in _blocks(query, window)
    ]
    outputs, logs = zip(*parts, strict=True)
    return torch.cat(outputs, 2), torch.cat(logs, 2)


def cpu_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    scale: float,
    window: int,
    causal: bool = True,
) -> tuple[Tensor, ...]:
    """The gradients of query, key and value."""
    fused = aten._scaled_dot_product_flash_attention_for_cpu_backward
    if not window or query.shape[2] <= window:
        gradients: tuple[Tensor, ...] = fused(gradient, query, key, value, output, lse, 0.0, causal, scale=scale)
        return gradients
    exact = torch.promote_types(query.dtype, torch.float32)  # keys get parts of their gradients from several blocks
    d_query, d_key, d_value = [], torch.zeros_like(key, dtype=exact), torch.zeros_like(value, dtype=exact)
    for queries, seen, band in _blocks(query, window):
        inputs = (query[:, :, queries], key[:, :, seen], value[:, :, seen], output[:, :, queries], lse[:, :, queries])
        parts = fused(gradient[:, :, queries], *inputs, 0.0, False, attn_mask=band, scale=scale)
        d_query.append(parts[0])
        d_key[:, :, seen] += parts[1]
        d_value[:, :, seen] += parts[2]
    return torch.cat(d_query, 2), d_key.to(key.dtype), d_value.to(value.dtype)


def _blocks(query: Tensor, window: int) -> Iterator[Block]:
    tokens = query.shape[2]
    for start in range(0, tokens, BLOCK):
        end, first = min(start + BLOCK, tokens), max(0, start + 1 - window)
        yield slice(start, end), slice(first, end), _band(start - first, end - start, window, query.dtype)


@functools.lru_cache(maxsize=16)  # all layers and samples ask for the same few
def _band(before: int, count: int, window: int, dtype: torch.dtype) -> Tensor:
    """(count, before + count): 0 where a query sees a key, else -inf. before: keys before the first query."""
    places, keys = torch.arange(before, before + count)[:, None], torch.arange(before + count)
    seen = (keys <= places) & (places - keys < window)
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -torch.inf)
