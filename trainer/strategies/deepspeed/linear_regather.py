"""Linear layers that recompute gathered weights in the backward pass instead of keeping them.

torch saves the transposed weight of each product for the backward pass, and autocast caches bf16 copies until the
forward pass ends: either would hold all gathered weights at once. Here only the parameter is saved, which ZeRO-3
gathers again before the gradient is computed. The result is the same.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F


def recompute_gathered_linear(module: nn.Module) -> None:
    """Replace the forward of every linear layer, except a head that computes the loss, which does this already."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear) and "forward" not in vars(layer):
            layer.forward = functools.partial(_forward, layer)  # type: ignore[method-assign]


def _forward(layer: nn.Linear, rows: Tensor) -> Tensor:
    product: Tensor = _Linear.apply(rows, layer.weight, layer.bias)
    return product


class _LinearContext(FunctionCtx):
    """Values saved for the backward pass."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    compute_dtype: torch.dtype


class _Linear(torch.autograd.Function):
    """(..., inputs) -> (..., outputs), in autocast's type where it is on."""

    @staticmethod
    def forward(ctx: _LinearContext, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        device = rows.device.type
        ctx.compute_dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else rows.dtype
        ctx.save_for_backward(rows, weight)
        with torch.autocast(device, enabled=False):
            dtype = ctx.compute_dtype
            return F.linear(rows.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))

    @staticmethod
    def backward(ctx: _LinearContext, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        rows, weight = ctx.saved_tensors
        gradient = gradients[0].flatten(0, -2)  # (rows, outputs)
        of_sequences = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_sequences = (gradient @ weight.to(ctx.compute_dtype)).view_as(rows).to(rows.dtype)
        if ctx.needs_input_grad[1]:
            of_weight = (gradient.t() @ rows.flatten(0, -2).to(ctx.compute_dtype)).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            of_bias = gradient.sum(0).to(weight.dtype)
        return of_sequences, of_weight, of_bias
