"""Attention by sample as one operation of torch, with its gradients and FLOPs.

Compiled layers, activation checkpointing and traces handle it as a matrix product.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import FunctionCtx
from torch.utils.flop_counter import register_flop_formula

from vlmpipe.trainer.models.attention.kernel_choice import kernel_for
from vlmpipe.trainer.models.attention.kernels import Kernel, VarlenArgs, exact
from vlmpipe.trainer.models.attention.merged_parts import with_image_blocks, with_prefixes


@torch.library.custom_op("vlmpipe::attend", mutates_args=())
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    device_bounds: Tensor,
    scale: float,
    window: int = 0,
    blocks: Tensor | None = None,
    prefixes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention inside samples. Shapes, window: see `vlmpipe.trainer.models.attention.kernels`.

    bounds, device_bounds, blocks, prefixes: see `CuSeqlens`. Returns the output, and for the backward pass the
    log-sum-exp of scores.
    """
    with torch.autocast(query.device.type, enabled=False):
        kernel = _kernel_with(query, key, window, blocks, prefixes)
        return kernel.forward(query, key, value, VarlenArgs(bounds, device_bounds, scale, window))


def _kernel_with(query: Tensor, key: Tensor, window: int, blocks: Tensor | None, prefixes: Tensor | None) -> Kernel:
    kernel = kernel_for(query, key, window, shared=prefixes is not None)
    return with_prefixes(with_image_blocks(kernel, blocks, query.device), prefixes, query.device)


@attend.register_fake
def _(query: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    sequences, tokens, heads = query.shape[:3]
    return query.new_empty(query.shape), query.new_empty(heads, sequences * tokens, dtype=exact(query.dtype))


@torch.library.custom_op("vlmpipe::attend_backward", mutates_args=())
def attend_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    bounds: Tensor,
    device_bounds: Tensor,
    scale: float,
    window: int = 0,
    blocks: Tensor | None = None,
    prefixes: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value."""
    with torch.autocast(query.device.type, enabled=False):
        args = VarlenArgs(bounds, device_bounds, scale, window)
        kernel = _kernel_with(query, key, window, blocks, prefixes)
        return kernel.backward(gradient, query, key, value, output, lse, args)


@attend_backward.register_fake
def _(_gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


class _AttendContext(FunctionCtx):
    """Values saved for the backward pass."""

    saved_tensors: tuple[Tensor, ...]
    scale: float
    window: int


Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, float, int, "Tensor | None", "Tensor | None"]  # of `attend`


def _save(ctx: _AttendContext, inputs: Inputs, output: tuple[Tensor, Tensor]) -> None:
    query, key, value, bounds, device_bounds, ctx.scale, ctx.window, *spans = inputs
    ctx.save_for_backward(query, key, value, *output, bounds, device_bounds, *spans)  # type: ignore[arg-type]


def _backward(ctx: _AttendContext, gradient: Tensor, _d_lse: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, blocks, prefixes = ctx.saved_tensors  # checkpointing unpacks them once
    gradients = attend_backward(gradient, *tensors, ctx.scale, ctx.window, blocks, prefixes)
    return *gradients, *(None,) * 6


attend.register_autograd(_backward, setup_context=_save)
ATTEND = torch.ops.vlmpipe.attend.default  # what dispatch modes see


@register_flop_formula(torch.ops.vlmpipe.attend, get_raw=True)
def forward_flops(
    query: Tensor,
    _key: Tensor,
    _value: Tensor,
    bounds: Tensor,
    _device_bounds: Tensor,
    _scale: float,
    window: int = 0,
    _blocks: Tensor | None = None,
    prefixes: Tensor | None = None,
    *_: object,
    **__: object,
) -> int:
    """Two products of each token with its whole sample, as `vlmpipe.trainer.sizing.flops` counts; with a window, twice
    those with tokens in sight. Later tokens of an image are not counted; those of branches with a prefix count twice,
    as with the rest of their sample."""
    if isinstance(bounds, FakeTensor):  # has no values: count each sequence as one sample
        lengths = torch.full((query.shape[0],), query.shape[1])
    else:
        lengths = bounds.long().diff().flatten()
    near = lengths.clamp(max=window) if window else lengths
    pairs = int((near * (2 * lengths - near)).sum())
    if prefixes is not None and not isinstance(prefixes, FakeTensor):
        first, end, stop = prefixes.long().unbind(1)
        pairs += 2 * int(((stop - end) * (end - first)).sum())
    return 4 * pairs * query.shape[2] * query.shape[3]


@register_flop_formula(torch.ops.vlmpipe.attend_backward, get_raw=True)
def backward_flops(
    _gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _output: Tensor,
    _lse: Tensor,
    *rest: Any,
    **__: object,
) -> int:
    """Four products; recomputed scores are not counted."""
    return 2 * forward_flops(query, key, value, *rest)
