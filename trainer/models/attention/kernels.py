"""Kernels of causal variable-length attention and its gradients, by device.

All take query (sequences, tokens, heads, head_dim), and key and value (sequences, tokens, kv_heads, head_dim), each of
whose heads serves equally many consecutive query heads. Results are new and contiguous.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from vlmpipe.trainer.models.attention.cpu_windows import cpu_backward, cpu_forward
from vlmpipe.trainer.models.attention.cu_seqlens import PADDING_PIECE, CuSeqlens
from vlmpipe.trainer.models.attention.sample_groups import clear, groups_of

aten = torch.ops.aten
MAX_SCORES = 1 << 24  # held at a time, several times over, without a fused kernel: 64 MiB each in fp32
MAX_FLASH_HEAD_DIM = 256  # of torch's flash kernels, which also take multiples of 8 only
MIN_FLASH_CAPABILITY = (8, 0)
TRIAL_WINDOW = 40  # tokens
TRIAL_TOLERANCE = 0.02  # of the largest number; two kernels in bf16 or fp16 differ by some 0.005

Tensors = tuple[Tensor, ...]


class VarlenArgs(NamedTuple):
    """Arguments of kernels besides the tensors."""

    bounds: Tensor  # this and the next: see `CuSeqlens`
    device_bounds: Tensor
    scale: float  # of scores
    window: int = 0  # tokens that a token sees, itself the last; 0 is all before it


@dataclass(frozen=True)
class Kernel:
    """Attention inside all samples.

    forward: (query, key, value, args) -> (output, log-sum-exp of scores (heads, all tokens)). backward: (gradient of
    output, query, key, value, output, log-sum-exp, args) -> gradients of query, key and value.
    """

    forward: Callable[[Tensor, Tensor, Tensor, VarlenArgs], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, VarlenArgs], tuple[Tensor, Tensor, Tensor]]


def kernel_for(query: Tensor, key: Tensor, window: int = 0) -> Kernel:
    """The fastest kernel that is known to be correct for such tensors. window: see `VarlenArgs`."""
    if query.device.type == "cpu":
        return CPU
    if query.device.type == "cuda" and flash_takes(query) and is_right(FLASH, query, key, window):
        return FLASH
    return BLOCKWISE


def is_right(kernel: Kernel, query: Tensor, key: Tensor, window: int = 0) -> bool:
    """Return whether `kernel` agrees with plain products on a few short samples; warns if not.

    Tried once for each shape of heads, type and device, and with windows.
    """
    trial_window = TRIAL_WINDOW if window else 0
    return _is_right(kernel, query.device, query.dtype, query.shape[2], key.shape[2], query.shape[3], trial_window)


@functools.cache
def _is_right(
    kernel: Kernel, device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, window: int
) -> bool:
    lengths, tokens = [[3, 130, 1], [64, 65]], 144
    samples = CuSeqlens.of(lengths, tokens).to(device)
    args = VarlenArgs(samples.bounds, samples.device_bounds, head_dim**-0.5, window)
    noise = torch.Generator(device).manual_seed(0)  # leaves the run's own random numbers alone
    query, gradient, key, value = (
        torch.randn(len(lengths), tokens, count, head_dim, generator=noise, device=device).to(dtype)
        for count in (heads, heads, kv_heads, kv_heads)
    )

    in_sample = torch.cat([torch.arange(tokens, device=device) < sum(own) for own in lengths])

    def results(tried: Kernel) -> list[Tensor]:
        """Return output and gradients at tokens of samples. Kernels may differ in padding, which has no loss."""
        output, lse = tried.forward(query, key, value, args)
        found = [output, *tried.backward(gradient, query, key, value, output, lse, args)]
        return [each.flatten(0, 1)[in_sample] for each in found]

    try:
        pairs = zip(results(kernel), results(BLOCKWISE), strict=True)
        apart = float(torch.stack([(ours - plain).abs().max() / plain.abs().max() for ours, plain in pairs]).max())
    except torch.OutOfMemoryError:  # no verdict on the kernel
        raise
    except RuntimeError as error:
        found = str(error).splitlines()[0]
    else:
        if apart <= TRIAL_TOLERANCE:  # false for NaN
            return True
        found = f"its results differ from those of plain products by {apart:.2g} of the largest number"
    warnings.warn(
        f"torch's flash attention of samples is not used for {heads} heads of {head_dim} in {dtype} on {device}: "
        f"{found}. Plain products are, which take longer.",
        stacklevel=2,
    )
    return False


def flash_takes(query: Tensor) -> bool:
    """Return whether torch's flash kernels have code for such heads on this GPU. query: (..., head_dim)."""
    head_dim = query.shape[-1]
    return (
        query.dtype in (torch.bfloat16, torch.float16)
        and head_dim % 8 == 0
        and head_dim <= MAX_FLASH_HEAD_DIM
        and torch.cuda.get_device_capability(query.device) >= MIN_FLASH_CAPABILITY
    )


def _flash_forward(query: Tensor, key: Tensor, value: Tensor, args: VarlenArgs) -> tuple[Tensor, Tensor]:
    """All samples in one launch."""
    flat = [tensor.flatten(0, 1).contiguous() for tensor in (query, key, value)]  # results have their inputs' strides
    output, lse, *_ = aten._flash_attention_forward(
        *flat, *_flash_bounds(args), 0.0, True, False, **_flash_options(args)
    )
    return output.view(query.shape), lse


def _flash_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, args: VarlenArgs
) -> tuple[Tensor, Tensor, Tensor]:
    flat = [tensor.flatten(0, 1).contiguous() for tensor in (gradient, query, key, value, output)]
    no_dropout, unused = torch.zeros(2, dtype=torch.uint64, device=query.device), query.new_empty(0)
    gradients = aten._flash_attention_backward(
        *flat, lse, *_flash_bounds(args), 0.0, True, no_dropout, unused, **_flash_options(args)
    )
    return gradients[0].view(query.shape), gradients[1].view(key.shape), gradients[2].view(value.shape)


def _flash_bounds(args: VarlenArgs) -> tuple[Tensor, Tensor, int, int]:
    longest = max(int(args.bounds.diff().max()), PADDING_PIECE)  # on the host
    return args.device_bounds, args.device_bounds, longest, longest


def _flash_options(args: VarlenArgs) -> dict[str, float]:
    return {"scale": args.scale} | (
        {"window_size_left": args.window - 1, "window_size_right": 0} if args.window else {}
    )


def _sample_by_sample(forward: Callable[..., Tensors], backward: Callable[..., Tensors]) -> Kernel:
    """From functions of equally long samples: (samples, heads, tokens, head_dim) each, key and value with as many heads
    as the query.

    forward: (query, key, value, scale, window) -> (output, log-sum-exp (samples, heads, tokens)). backward: (gradient,
    query, key, value, output, log-sum-exp, scale, window) -> gradients of query, key and value. Padding gets zeros.
    """

    def all_forward(query: Tensor, key: Tensor, value: Tensor, args: VarlenArgs) -> tuple[Tensor, Tensor]:
        heads = query.shape[2]
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        lse = torch.empty(heads, query.shape[:2].numel(), dtype=exact(query.dtype), device=query.device)
        inputs = [_heads_first(tensor) for tensor in (query, key, value)]
        groups, padding = groups_of(args.bounds, query)
        clear(padding, _heads_first(output), lse)
        for group in groups:
            own, *seen = (group.read(input_) for input_ in inputs)
            found = forward(own, *(_repeated(each, heads) for each in seen), scale=args.scale, window=args.window)
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
        groups, padding = groups_of(args.bounds, query)
        clear(padding, *totals)
        d_outputs, *inputs = (_heads_first(tensor) for tensor in (gradient, query, key, value, output))
        for group in groups:
            own, *seen, computed = (group.read(input_) for input_ in inputs)
            seen = [_repeated(each, heads) for each in seen]
            d_output = group.read(d_outputs, repeat=False)
            saved = (computed, group.read(lse))
            found = backward(d_output, own, *seen, *saved, scale=args.scale, window=args.window)
            for total, each in zip(totals, found, strict=True):
                is_shared = len(total) < heads
                group.write(each.unflatten(1, (kv_heads, -1)).sum(2) if is_shared else each, total)
        return d_query, d_key, d_value

    return Kernel(all_forward, all_backward)


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


def _block_tokens(query: Tensor) -> int:
    """Queries whose scores are held at a time."""
    heads, tokens = query.shape[1:3]
    return max(1, MAX_SCORES // (heads * tokens))


def _seen(start: int, count: int, window: int) -> slice:
    """Keys that some of `count` queries from token `start` see."""
    return slice(max(0, start + 1 - window) if window else 0, start + count)


def _scores(query: Tensor, key: Tensor, start: int, scale: float, window: int) -> Tensor:
    """Scores of a block of queries from token `start` with the keys of `_seen`; -inf for those out of sight."""
    seen = _seen(start, query.shape[2], window)
    queries = torch.arange(start, seen.stop, device=query.device)[:, None]
    keys = torch.arange(seen.start, seen.stop, device=query.device)
    hidden = (queries < keys) | (queries - keys >= window) if window else queries < keys
    return (query @ key[:, :, seen].mT * scale).masked_fill(hidden, -torch.inf)


def _block_forward(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int) -> Tensors:
    outputs, logs = [], []
    query, key, value = (tensor.to(exact(query.dtype)) for tensor in (query, key, value))
    size = _block_tokens(query)
    for start in range(0, query.shape[2], size):
        block = query[:, :, start : start + size]
        scores = _scores(block, key, start, scale, window)
        logs.append(scores.logsumexp(-1))
        outputs.append((scores - logs[-1][..., None]).exp_() @ value[:, :, _seen(start, block.shape[2], window)])
    return torch.cat(outputs, 2), torch.cat(logs, 2)


def _block_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, scale: float, window: int
) -> Tensors:
    """Dao et al. 2022 (arXiv 2205.14135), algorithm 4, with all keys of a block of queries at a time."""
    inputs = (gradient, query, key, value, output)
    gradient, query, key, value, output = (input_.to(exact(query.dtype)) for input_ in inputs)
    d_query, d_key, d_value = [], torch.zeros_like(key), torch.zeros_like(value)
    weighted = (gradient * output).sum(-1, keepdim=True)
    size = _block_tokens(query)
    for start in range(0, query.shape[2], size):
        block = slice(start, start + size)
        own, d_output = query[:, :, block], gradient[:, :, block]
        shares = (_scores(own, key, start, scale, window) - lse[:, :, block, None]).exp_()
        seen = _seen(start, own.shape[2], window)
        d_value[:, :, seen] += shares.mT @ d_output
        d_scores = shares * (d_output @ value[:, :, seen].mT - weighted[:, :, block]) * scale
        d_query.append(d_scores @ key[:, :, seen])
        d_key[:, :, seen] += d_scores.mT @ own
    return torch.cat(d_query, 2), d_key, d_value


CPU = _sample_by_sample(cpu_forward, cpu_backward)
BLOCKWISE = _sample_by_sample(_block_forward, _block_backward)
FLASH = Kernel(_flash_forward, _flash_backward)
