"""Kernels of variable-length attention and its gradients, by device: causal in samples, or of queries with other keys.

All take query (sequences, tokens, heads, head_dim), and key and value (sequences, tokens, kv_heads, head_dim), each of
whose heads serves equally many consecutive query heads. Results are new and contiguous.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from vlmpipe.trainer.models.attention.cu_seqlens import PADDING_PIECE, CuSeqlens
from vlmpipe.trainer.models.attention.sample_groups import Group, Spans, clear, groups_of, rectangles_of

aten = torch.ops.aten
MAX_SCORES = 1 << 24  # held at a time, several times over, without a fused kernel: 64 MiB each in fp32
CPU_BLOCK = 128  # queries with a window in one call of the CPU's fused kernel

Tensors = tuple[Tensor, ...]


class VarlenArgs(NamedTuple):
    """Arguments of kernels besides the tensors."""

    bounds: Tensor  # this and the next: see `CuSeqlens`
    device_bounds: Tensor
    scale: float  # of scores
    window: int = 0  # tokens that a token sees, itself the last; 0 is all before it
    # Pieces of keys, which follow each other without gaps, none of them empty: each piece of queries sees the whole of
    # its own. None: causal attention inside samples.
    keys: CuSeqlens | None = None


@dataclass(frozen=True)
class Kernel:
    """Attention inside all samples, or of pieces of queries with pieces of keys (`VarlenArgs.keys`).

    forward: (query, key, value, args) -> (output, log-sum-exp of scores (heads, all tokens)). backward: (gradient of
    output, query, key, value, output, log-sum-exp, args) -> gradients of query, key and value. With the output and
    log-sum-exp of more keys than are given, they are those of the given keys' share.
    """

    forward: Callable[[Tensor, Tensor, Tensor, VarlenArgs], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, VarlenArgs], tuple[Tensor, Tensor, Tensor]]


def _flash_forward(query: Tensor, key: Tensor, value: Tensor, args: VarlenArgs) -> tuple[Tensor, Tensor]:
    """All samples in one launch."""
    flat = [tensor.flatten(0, 1).contiguous() for tensor in (query, key, value)]  # results have their inputs' strides
    output, lse, *_ = aten._flash_attention_forward(
        *flat, *_flash_bounds(args), 0.0, args.keys is None, False, **_flash_options(args)
    )
    return output.view(query.shape), lse


def _flash_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, args: VarlenArgs
) -> tuple[Tensor, Tensor, Tensor]:
    flat = [tensor.flatten(0, 1).contiguous() for tensor in (gradient, query, key, value, output)]
    no_dropout, unused = torch.zeros(2, dtype=torch.uint64, device=query.device), query.new_empty(0)
    gradients = aten._flash_attention_backward(
        *flat, lse, *_flash_bounds(args), 0.0, args.keys is None, no_dropout, unused, **_flash_options(args)
    )
    return gradients[0].view(query.shape), gradients[1].view(key.shape), gradients[2].view(value.shape)


def _flash_bounds(args: VarlenArgs) -> tuple[Tensor, Tensor, int, int]:
    keys = args.keys or args
    longest = [max(int(bounds.diff().max()), PADDING_PIECE) for bounds in (args.bounds, keys.bounds)]  # on the host
    return args.device_bounds, keys.device_bounds, longest[0], longest[1]


def _flash_options(args: VarlenArgs) -> dict[str, float]:
    window = {"window_size_left": args.window - 1, "window_size_right": 0} if args.window else {}
    return {"scale": args.scale, **window}


def _sample_by_sample(forward: Callable[..., Tensors], backward: Callable[..., Tensors]) -> Kernel:
    """From functions of equally long samples: (samples, heads, tokens, head_dim) each, key and value with as many heads
    as the query.

    forward: (query, key, value, args) -> (output, log-sum-exp (samples, heads, tokens)). backward: ((gradient, query,
    key, value, output, log-sum-exp), args) -> gradients of query, key and value. Padding gets zeros. Unless attention
    is causal, keys may be more or fewer than queries.
    """

    def all_forward(query: Tensor, key: Tensor, value: Tensor, args: VarlenArgs) -> tuple[Tensor, Tensor]:
        heads = query.shape[2]
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        lse = torch.empty(heads, query.shape[:2].numel(), dtype=exact(query.dtype), device=query.device)
        inputs = [_heads_first(tensor) for tensor in (query, key, value)]
        calls, padding = _calls(args, query)
        clear(padding, _heads_first(output), lse)
        for group, keys in calls:
            queries, *seen = (place.read(input_) for place, input_ in zip((group, keys, keys), inputs, strict=True))
            result = forward(queries, *(_repeated(tensor, heads) for tensor in seen), args)
            group.write(result[0], _heads_first(output))
            group.write(result[1], lse)
        return output, lse

    def all_backward(
        gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, args: VarlenArgs
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads, kv_heads = query.shape[2], key.shape[2]
        d_query, d_key, d_value = (
            torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in (query, key, value)
        )
        totals = [_heads_first(tensor) for tensor in (d_query, d_key, d_value)]
        calls, padding = _calls(args, query)
        clear(padding, *totals)
        d_outputs, *inputs, outputs = (_heads_first(tensor) for tensor in (gradient, query, key, value, output))
        for group, keys in calls:
            queries, *seen = (place.read(input_) for place, input_ in zip((group, keys, keys), inputs, strict=True))
            seen = [_repeated(tensor, heads) for tensor in seen]
            d_output = group.read(d_outputs, repeat=False)
            result = backward((d_output, queries, *seen, group.read(outputs), group.read(lse)), args)
            for place, total, gradient_of in zip((group, keys, keys), totals, result, strict=True):
                is_shared = len(total) < heads
                place.write(gradient_of.unflatten(1, (kv_heads, -1)).sum(2) if is_shared else gradient_of, total)
        return d_query, d_key, d_value

    return Kernel(all_forward, all_backward)


def _calls(args: VarlenArgs, query: Tensor) -> tuple[Sequence[tuple[Group, Group]], Spans]:
    """Queries and keys of each call, and the padding between queries."""
    if args.keys is not None:
        return rectangles_of(args.bounds, args.keys.bounds), ()
    groups, padding = groups_of(args.bounds, query)
    return [(group, group) for group in groups], padding


def _heads_first(sequences: Tensor) -> Tensor:
    """(sequences, tokens, heads, head_dim) -> (heads, all tokens, head_dim), in the same memory where it can be."""
    return sequences.flatten(0, 1).transpose(0, 1)


def _repeated(samples: Tensor, heads: int) -> Tensor:
    """(samples, kv_heads, tokens, head_dim) -> (samples, heads, tokens, head_dim)."""
    shared_by = heads // samples.shape[1]
    return samples if shared_by == 1 else samples.repeat_interleave(shared_by, dim=1)


def exact(dtype: torch.dtype) -> torch.dtype:
    """The type in which kernels accumulate, and of their log-sum-exps."""
    return torch.promote_types(dtype, torch.float32)


def _blocks(
    query: Tensor, key: Tensor, args: VarlenArgs, size: int, dtype: torch.dtype
) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """Queries, the keys that some of them see, and the bias of their scores: 0, or -inf out of sight."""
    for start in range(0, query.shape[2], size):
        end = min(start + size, query.shape[2])
        if args.keys is not None:
            yield slice(start, end), slice(0, key.shape[2]), None
            continue
        first = max(0, start + 1 - args.window) if args.window else 0
        places = torch.arange(start, end, device=query.device)[:, None]
        keys = torch.arange(first, end, device=query.device)
        hidden = (places < keys) | (places - keys >= args.window) if args.window else places < keys
        band = torch.zeros(hidden.shape, dtype=dtype, device=query.device).masked_fill_(hidden, -torch.inf)
        yield slice(start, end), slice(first, end), band


def _forward_by_blocks(
    of_block: Callable[..., Tensors], query: Tensor, key: Tensor, value: Tensor, args: VarlenArgs, size: int
) -> Tensors:
    """of_block: (queries, keys, values, what is added to scores) -> (output, log-sum-exp). size: queries of a block."""
    parts = [
        of_block(query[:, :, queries], key[:, :, seen], value[:, :, seen], band)
        for queries, seen, band in _blocks(query, key, args, size, query.dtype)
    ]
    outputs, logs = zip(*parts, strict=True)
    return torch.cat(outputs, 2), torch.cat(logs, 2)


def _backward_by_blocks(
    of_block: Callable[..., Tensors], tensors: Sequence[Tensor], args: VarlenArgs, size: int
) -> Tensors:
    """of_block: (*tensors of the block, what is added to scores) -> gradients of its queries, keys and values. tensors:
    see `_sample_by_sample`. Gradients of keys and values, which several blocks see, are in `exact`."""
    gradient, query, key, value, output, lse = tensors
    d_query, (d_key, d_value) = [], (torch.zeros_like(tensor, dtype=exact(key.dtype)) for tensor in (key, value))
    for queries, seen, band in _blocks(query, key, args, size, query.dtype):
        d_output, queried, out, logs = (tensor[:, :, queries] for tensor in (gradient, query, output, lse))
        parts = of_block(d_output, queried, key[:, :, seen], value[:, :, seen], out, logs, band)
        d_query.append(parts[0])
        d_key[:, :, seen] += parts[1]
        d_value[:, :, seen] += parts[2]
    return torch.cat(d_query, 2), d_key, d_value


def _cpu_block(operation: Callable[..., Tensors], args: VarlenArgs) -> Callable[..., Tensors]:
    """torch's fused attention of the CPU, which knows no windows, or its gradients."""

    def of_block(*inputs: Tensor | None) -> Tensors:
        *tensors, band = inputs
        is_causal, no_dropout = band is None and args.keys is None, 0.0
        return operation(*tensors, no_dropout, is_causal, attn_mask=band, scale=args.scale)

    return of_block


def _cpu_forward(query: Tensor, key: Tensor, value: Tensor, args: VarlenArgs) -> Tensors:
    of_block = _cpu_block(aten._scaled_dot_product_flash_attention_for_cpu, args)
    if not args.window or query.shape[2] <= args.window:
        return of_block(query, key, value, None)
    return _forward_by_blocks(of_block, query, key, value, args, CPU_BLOCK)


def _cpu_backward(tensors: Sequence[Tensor], args: VarlenArgs) -> Tensors:
    of_block = _cpu_block(aten._scaled_dot_product_flash_attention_for_cpu_backward, args)
    _, query, key, *_ = tensors
    if not args.window or query.shape[2] <= args.window:
        return of_block(*tensors, None)
    d_query, d_key, d_value = _backward_by_blocks(of_block, tensors, args, CPU_BLOCK)
    return d_query, d_key.to(key.dtype), d_value.to(key.dtype)


def _plain_scores(query: Tensor, key: Tensor, band: Tensor | None, scale: float) -> Tensor:
    scores = query @ key.mT * scale
    return scores if band is None else scores.add_(band)


def _plain_forward(query: Tensor, key: Tensor, value: Tensor, args: VarlenArgs) -> Tensors:
    def of_block(query: Tensor, key: Tensor, value: Tensor, band: Tensor | None) -> Tensors:
        scores = _plain_scores(query, key, band, args.scale)
        lse = scores.logsumexp(-1)
        return (scores - lse[..., None]).exp_() @ value, lse

    query, key, value = (tensor.to(exact(query.dtype)) for tensor in (query, key, value))
    return _forward_by_blocks(of_block, query, key, value, args, _block_tokens(query, key))


def _plain_backward(tensors: Sequence[Tensor], args: VarlenArgs) -> Tensors:
    """Dao et al. 2022 (arXiv 2205.14135), algorithm 4, with all keys of a block of queries at a time."""

    def of_block(
        gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, band: Tensor | None
    ) -> Tensors:
        shares = (_plain_scores(query, key, band, args.scale) - lse[..., None]).exp_()
        weighted = (gradient * output).sum(-1, keepdim=True)
        d_scores = shares * (gradient @ value.mT - weighted) * args.scale
        return d_scores @ key, d_scores.mT @ query, shares.mT @ gradient

    tensors = [tensor.to(exact(tensor.dtype)) for tensor in tensors]
    return _backward_by_blocks(of_block, tensors, args, _block_tokens(tensors[1], tensors[2]))


def _block_tokens(query: Tensor, key: Tensor) -> int:
    """Queries whose scores are held at a time."""
    return max(1, MAX_SCORES // (query.shape[1] * key.shape[2]))


CPU = _sample_by_sample(_cpu_forward, _cpu_backward)
BLOCKWISE = _sample_by_sample(_plain_forward, _plain_backward)
FLASH = Kernel(_flash_forward, _flash_backward)
