"""Kernels of variable-length attention and its gradients, by device: causal in samples, or of queries with other keys.

All take query (sequences, tokens, heads, head_dim), and key and value (sequences, tokens, kv_heads, head_dim), each of
whose heads serves equally many consecutive query heads. Results are new and contiguous.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypedDict

import torch
from torch import Tensor

from vlmpipe.trainer.models.attention.cpu_windows import cpu_backward, cpu_forward
from vlmpipe.trainer.models.attention.cu_seqlens import PADDING_PIECE
from vlmpipe.trainer.models.attention.sample_groups import Group, Spans, clear, groups_of, rectangles_of

aten = torch.ops.aten
MAX_SCORES = 1 << 24  # held at a time, several times over, without a fused kernel: 64 MiB each in fp32

Tensors = tuple[Tensor, ...]


class KeyBounds(NamedTuple):
    """Bounds of keys that are not those of the queries: piece k of the queries sees the whole of piece k of the keys.

    Pieces follow each other without gaps, and none is empty.
    """

    bounds: Tensor  # this and the next: see `CuSeqlens`
    device_bounds: Tensor


class VarlenArgs(NamedTuple):
    """Arguments of kernels besides the tensors."""

    bounds: Tensor  # this and the next: see `CuSeqlens`
    device_bounds: Tensor
    scale: float  # of scores
    window: int = 0  # tokens that a token sees, itself the last; 0 is all before it
    keys: KeyBounds | None = None  # None: causal attention inside samples


class _Options(TypedDict):
    scale: float
    window: int
    causal: bool


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
    return {"scale": args.scale} | (
        {"window_size_left": args.window - 1, "window_size_right": 0} if args.window else {}
    )


def _sample_by_sample(forward: Callable[..., Tensors], backward: Callable[..., Tensors]) -> Kernel:
    """From functions of equally long samples: (samples, heads, tokens, head_dim) each, key and value with as many heads
    as the query.

    forward: (query, key, value, scale, window, causal) -> (output, log-sum-exp (samples, heads, tokens)). backward:
    (gradient, query, key, value, output, log-sum-exp, scale, window, causal) -> gradients of query, key and value.
    Padding gets zeros. Without `causal`, keys may be more or fewer than queries.
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
            found = forward(queries, *(_repeated(tensor, heads) for tensor in seen), **_options(args))
            group.write(found[0], _heads_first(output))
            group.write(found[1], lse)
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
            saved = (group.read(outputs), group.read(lse))
            found = backward(d_output, queries, *seen, *saved, **_options(args))
            for place, total, gradient_of in zip((group, keys, keys), totals, found, strict=True):
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


def _options(args: VarlenArgs) -> _Options:
    return {"scale": args.scale, "window": args.window, "causal": args.keys is None}


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


def _block_tokens(query: Tensor, key: Tensor) -> int:
    """Queries whose scores are held at a time."""
    return max(1, MAX_SCORES // (query.shape[1] * key.shape[2]))


def _seen(start: int, query: Tensor, keys: int, window: int, causal: bool) -> slice:
    """Keys that some of a block of queries from token `start` see."""
    if not causal:
        return slice(0, keys)
    return slice(max(0, start + 1 - window) if window else 0, start + query.shape[2])


def _scores(query: Tensor, key: Tensor, start: int, scale: float, window: int, causal: bool) -> Tensor:
    """Scores of a block of queries from token `start` with the keys of `_seen`; -inf for those out of sight."""
    seen = _seen(start, query, key.shape[2], window, causal)
    scores = query @ key[:, :, seen].mT * scale
    if not causal:
        return scores
    queries = torch.arange(start, seen.stop, device=query.device)[:, None]
    keys = torch.arange(seen.start, seen.stop, device=query.device)
    hidden = (queries < keys) | (queries - keys >= window) if window else queries < keys
    return scores.masked_fill(hidden, -torch.inf)


def _block_forward(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: int, causal: bool = True
) -> Tensors:
    outputs, logs = [], []
    query, key, value = (tensor.to(exact(query.dtype)) for tensor in (query, key, value))
    size = _block_tokens(query, key)
    for start in range(0, query.shape[2], size):
        block = query[:, :, start : start + size]
        scores = _scores(block, key, start, scale, window, causal)
        logs.append(scores.logsumexp(-1))
        seen = _seen(start, block, key.shape[2], window, causal)
        outputs.append((scores - logs[-1][..., None]).exp_() @ value[:, :, seen])
    return torch.cat(outputs, 2), torch.cat(logs, 2)


def _block_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    scale: float,
    window: int,
    causal: bool = True,
) -> Tensors:
    """Dao et al. 2022 (arXiv 2205.14135), algorithm 4, with all keys of a block of queries at a time."""
    inputs = (gradient, query, key, value, output)
    gradient, query, key, value, output = (input_.to(exact(query.dtype)) for input_ in inputs)
    d_query, d_key, d_value = [], torch.zeros_like(key), torch.zeros_like(value)
    weighted = (gradient * output).sum(-1, keepdim=True)
    size = _block_tokens(query, key)
    for start in range(0, query.shape[2], size):
        block = slice(start, start + size)
        own, d_output = query[:, :, block], gradient[:, :, block]
        shares = (_scores(own, key, start, scale, window, causal) - lse[:, :, block, None]).exp_()
        seen = _seen(start, own, key.shape[2], window, causal)
        d_value[:, :, seen] += shares.mT @ d_output
        d_scores = shares * (d_output @ value[:, :, seen].mT - weighted[:, :, block]) * scale
        d_query.append(d_scores @ key[:, :, seen])
        d_key[:, :, seen] += d_scores.mT @ own
    return torch.cat(d_query, 2), d_key, d_value


CPU = _sample_by_sample(cpu_forward, cpu_backward)
BLOCKWISE = _sample_by_sample(_block_forward, _block_backward)
FLASH = Kernel(_flash_forward, _flash_backward)
