"""Images of a traced forward pass, which hold the memory of encoder and projector without running them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx


@dataclass(frozen=True)
class VisionBytes:
    """Memory of images in encoder and projector: at the peak of the forward pass, from there to the
    backward pass, and at the peak of that."""

    forward: int = 0
    kept: int = 0
    backward: int = 0


class _EncodedContext(FunctionCtx):
    """Values saved for the backward pass."""

    kept: Tensor
    size: VisionBytes


class Encoded(torch.autograd.Function):
    """Projected images of a trace, which allocate what encoder and projector would."""

    @staticmethod
    def forward(ctx: _EncodedContext, projected: Tensor, size: VisionBytes) -> Tensor:
        ctx.kept, ctx.size = projected.new_empty(size.kept, dtype=torch.uint8), size
        projected.new_empty(max(0, size.forward - size.kept - projected.nbytes), dtype=torch.uint8)
        return projected.clone()

    @staticmethod
    def backward(ctx: _EncodedContext, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        gradient.new_empty(max(0, ctx.size.backward - ctx.size.kept - gradient.nbytes), dtype=torch.uint8)
        del ctx.kept
        return gradient, None
