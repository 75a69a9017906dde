"""Kernels of causal variable-length attention and its gradients, by device.

All take query (rows, tokens, heads, head_dim) and key and value (rows, tokens, kv_heads, head_dim), of which as many
query heads in a row share each. What they return is new and contiguous.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.models.attention.cu_seqlens import CuSeqlens

aten = torch.ops.aten
SCORES = 1 << 24  # numbers that exist at a time, some times over, where no fused kernel is at hand: 64 MiB in fp32
MOST_FLASH_HEAD_DIM = 256  # torch's flash kernels take no larger heads, and only multiples of 8
FIRST_FLASH_CAPABILITY = (8, 0)
TRIAL_TOLERANCE = 0.02  # of the largest number; two kernels in bf16 or fp16 are some 0.005 apart

OnPiece = Callable[..., tuple[Tensor, ...]]


class VarlenArgs(NamedTuple):
    """What kernels take beside tensors of numbers."""

    bounds: Tensor  # this and the next: those of `Samples`
    device_bounds: Tensor
    scale: float  # of scores


Forward = Callable[[Tensor, Tensor, Tensor, VarlenArgs], tuple[Tensor, Tensor]]
Backward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, VarlenArgs], tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True)
class Kernel:
    """Of all samples.

    forward: (query, key, value, call) -> (output, log-sum-exp of scores (heads, slots)). backward: (gradient of output,
    query, key, value, output, log-sum-exp, call) -> gradients of query, key and value.
    """

    forward: Forward
    backward: Backward


def kernel_for(query: Tensor, key: Tensor) -> Kernel:
    """The fastest that is sure to be right for such tensors."""
    if query.device.type == "cpu":
        return CPU
    if query.device.type == "cuda" and _flash_takes(query) and is_right(FLASH, query, key):
        return FLASH
    return BLOCKWISE


def is_right(kernel: Kernel, query: Tensor, key: Tensor) -> bool:
    """Whether `kernel` gives, for a few short samples, what plain products give. Tried once for each kind of tensors;
    a kernel that does not is told of in a warning."""
    return _is_right(kernel, query.device, query.dtype, query.shape[2], key.shape[2], query.shape[3])


@functools.cache
def _is_right(
    kernel: Kernel, device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int
) -> bool:
    lengths, slots = [[3, 130, 1], [64, 65]], 144
    samples = CuSeqlens.of(lengths, slots).to(device)
    noise = torch.Generator(device).manual_seed(0)  # its own: the run's random numbers stay what they are

    def random(count: int) -> Tensor:
        return torch.randn(len(lengths), slots, count, head_dim, generator=noise, device=device).to(dtype)

    query, gradient, key, value = (random(count) for count in (heads, heads, kv_heads, kv_heads))

    def results(tried: Kernel) -> list[Tensor]:
        call = VarlenArgs(samples.bounds, samples.device_bounds, head_dim**-0.5)
        output, lse = tried.forward(query, key, value, call)
        return [output, *tried.backward(gradient, query, key, value, output, lse, call)]

    try:
        pairs = zip(results(kernel), results(BLOCKWISE), strict=True)
        apart = float(torch.stack([(ours - plain).abs().max() / plain.abs().max() for ours, plain in pairs]).max())
    except torch.OutOfMemoryError:  # says nothing of the kernel
        raise
    except RuntimeError as error:
        found = str(error).splitlines()[0]
    else:
        if apart <= TRIAL_TOLERANCE:  # not so for NaN
            return True
        found = f"its results are {apart:.2g} of the largest number away from those of plain products"
    warnings.warn(
        f"torch's flash attention of samples is not used for {heads} heads of {head_dim} in {dtype} on {device}: "
        f"{found}. Plain products are, which take longer.",
        stacklevel=2,
    )
    return False


def _flash_takes(query: Tensor) -> bool:
    head_dim = query.shape[-1]
    return (
        query.dtype in (torch.bfloat16, torch.float16)
        and head_dim % 8 == 0
        and head_dim <= MOST_FLASH_HEAD_DIM
        and torch.cuda.get_device_capability(query.device) >= FIRST_FLASH_CAPABILITY
    )


def _flash_forward(query: Tensor, key: Tensor, value: Tensor, call: VarlenArgs) -> tuple[Tensor, Tensor]:
    """All samples in one launch."""
    flat = [each.flatten(0, 1).contiguous() for each in (query, key, value)]  # results lie as their inputs do
    found = aten._flash_attention_forward(*flat, *_where(call), 0.0, True, False, scale=call.scale)
    return found[0].view(query.shape), found[1]


def _flash_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, call: VarlenArgs
) -> tuple[Tensor, Tensor, Tensor]:
    flat = [each.flatten(0, 1).contiguous() for each in (gradient, query, key, value, output)]
    no_dropout, unused = torch.zeros(2, dtype=torch.uint64, device=query.device), query.new_empty(0)
    found = aten._flash_attention_backward(*flat, lse, *_where(call), 0.0, True, no_dropout, unused, scale=call.scale)
    like_query, like_key, like_value = (
        each.view(of.shape) for each, of in zip(found, (query, key, value), strict=True)
    )
    return like_query, like_key, like_value


def _where(call: VarlenArgs) -> tuple[Tensor, Tensor, int, int]:
    """As the kernel takes it: where queries and keys begin, and the most tokens of a sample."""
    longest = int(call.bounds.diff().max())  # on the host
    return call.device_bounds, call.device_bounds, longest, longest


def _piece_by_piece(forward: OnPiece, backward: OnPiece) -> Kernel:
    """From functions of one sample: (1, heads, tokens, head_dim) each, key and value with as many heads as the query.

    forward: (query, key, value, scale) -> (output, log-sum-exp (1, heads, tokens)). backward: (gradient, query, key,
    value, output, log-sum-exp, scale) -> gradients of query, key and value.
    """

    def all_forward(query: Tensor, key: Tensor, value: Tensor, call: VarlenArgs) -> tuple[Tensor, Tensor]:
        tokens, heads = query.shape[1:3]
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        lse = torch.empty(heads, query.shape[0] * tokens, dtype=exact(query.dtype), device=query.device)
        for place in _places(call.bounds, tokens):
            own = _of_piece(query, place), *(_repeated(_of_piece(each, place), heads) for each in (key, value))
            found, in_logs = forward(*own, call.scale)
            _of_piece(output, place).copy_(found)
            _in_logs(lse, place, tokens).copy_(in_logs)
        return output, lse

    def all_backward(
        gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, call: VarlenArgs
    ) -> tuple[Tensor, Tensor, Tensor]:
        tokens, heads = query.shape[1:3]
        of_query, of_key, of_value = (
            torch.empty(each.shape, dtype=each.dtype, device=each.device) for each in (query, key, value)
        )
        for place in _places(call.bounds, tokens):
            of_output, mine, computed = (_of_piece(each, place) for each in (gradient, query, output))
            seen = [_repeated(_of_piece(each, place), heads) for each in (key, value)]
            found = backward(of_output, mine, *seen, computed, _in_logs(lse, place, tokens), call.scale)
            _of_piece(of_query, place).copy_(found[0])
            for whole, each in ((of_key, found[1]), (of_value, found[2])):
                _of_piece(whole, place).copy_(each.unflatten(1, (whole.shape[2], -1)).sum(2))
        return of_query, of_key, of_value

    return Kernel(all_forward, all_backward)


@dataclass(frozen=True)
class _Place:
    """Of a sample: its row, and its tokens in that."""

    row: int
    start: int
    stop: int


def _places(bounds: Tensor, tokens: int) -> Iterator[_Place]:
    for start, stop in itertools.pairwise(bounds.tolist()):
        if start < stop:
            row, first = divmod(start, tokens)
            yield _Place(row, first, first + stop - start)


def _of_piece(rows: Tensor, place: _Place) -> Tensor:
    """(rows, tokens, heads, head_dim) -> (1, heads, tokens of the piece, head_dim), in the same memory."""
    return rows[place.row, place.start : place.stop].transpose(0, 1).unsqueeze(0)


def _in_logs(lse: Tensor, place: _Place, tokens: int) -> Tensor:
    """(heads, slots) -> (1, heads, tokens of the piece), in the same memory."""
    first = place.row * tokens
    return lse[:, first + place.start : first + place.stop].unsqueeze(0)


def _repeated(piece: Tensor, heads: int) -> Tensor:
    """(1, kv_heads, tokens, head_dim) -> (1, heads, tokens, head_dim)."""
    shared_by = heads // piece.shape[1]
    return piece if shared_by == 1 else piece.repeat_interleave(shared_by, dim=1)


def exact(dtype: torch.dtype) -> torch.dtype:
    """What kernels add up in, and give log-sum-exps in, for inputs of a type."""
    return torch.promote_types(dtype, torch.float32)


def _cpu_forward(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, ...]:
    found: tuple[Tensor, ...] = aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, True, scale=scale
    )
    return found


def _cpu_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, ...]:
    found: tuple[Tensor, ...] = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, query, key, value, output, lse, 0.0, True, scale=scale
    )
    return found


def _block(query: Tensor) -> int:
    """Queries whose scores exist at a time."""
    heads, tokens = query.shape[1:3]
    return max(1, SCORES // (heads * tokens))


def _scores(query: Tensor, key: Tensor, start: int, scale: float) -> Tensor:
    """Of a block of queries that begins at token `start`, with all keys up to its last: -inf for those behind."""
    last = start + query.shape[2]
    own = torch.arange(start, last, device=query.device)
    hidden = own[:, None] < torch.arange(last, device=query.device)
    return (query @ key[:, :, :last].mT * scale).masked_fill(hidden, -torch.inf)


def _block_forward(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, ...]:
    outputs, logs = [], []
    query, key, value = (each.to(exact(query.dtype)) for each in (query, key, value))
    size = _block(query)
    for start in range(0, query.shape[2], size):
        scores = _scores(query[:, :, start : start + size], key, start, scale)
        logs.append(scores.logsumexp(-1))
        outputs.append((scores - logs[-1][..., None]).exp_() @ value[:, :, : scores.shape[-1]])
    return torch.cat(outputs, 2), torch.cat(logs, 2)


def _block_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, ...]:
    """Dao et al. 2022 (arXiv 2205.14135), algorithm 4, with all keys of a block of queries at a time."""
    given = (gradient, query, key, value, output)
    gradient, query, key, value, output = (each.to(exact(query.dtype)) for each in given)
    of_query, of_key, of_value = [], torch.zeros_like(key), torch.zeros_like(value)
    weighted = (gradient * output).sum(-1, keepdim=True)
    size = _block(query)
    for start in range(0, query.shape[2], size):
        block = slice(start, start + size)
        own, of_output = query[:, :, block], gradient[:, :, block]
        shares = (_scores(own, key, start, scale) - lse[:, :, block, None]).exp_()
        seen = shares.shape[-1]
        of_value[:, :, :seen] += shares.mT @ of_output
        of_scores = shares * (of_output @ value[:, :, :seen].mT - weighted[:, :, block]) * scale
        of_query.append(of_scores @ key[:, :, :seen])
        of_key[:, :, :seen] += of_scores.mT @ own
    return torch.cat(of_query, 2), of_key, of_value


CPU = _piece_by_piece(_cpu_forward, _cpu_backward)
BLOCKWISE = _piece_by_piece(_block_forward, _block_backward)
FLASH = Kernel(_flash_forward, _flash_backward)
