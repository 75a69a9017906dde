"""Row-parallel linear layers: a product and its sum over ranks as one operation.

Selective activation checkpointing saves its result. Apart, it would save each rank's whole product, of which sequence
parallelism leaves a share, and sum it again in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from vlmpipe.trainer.models.layers.saved_products import PRODUCTS
from vlmpipe.trainer.strategies.tensor_parallel.sequence_parallel import SequenceParallel
from vlmpipe.trainer.strategies.tensor_parallel.styles import PartialSum, with_forward


class RowwiseLinear(PartialSum):
    """(..., this rank's inputs) -> (..., outputs), replicated, or with `scatter` this rank's tokens of them."""

    def __init__(self, *, scatter: bool) -> None:
        super().__init__()
        self._scatter = scatter

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        super()._apply(module, device_mesh)
        shares = SequenceParallel.of(device_mesh) if self._scatter else None
        return _with_sum(module, shares, device_mesh.get_group().group_name)

    def cut(self, module: nn.Module, ranks: int) -> None:
        super().cut(module, ranks)
        _with_sum(module, SequenceParallel(ranks) if self._scatter else None, "")


def _with_sum(module: nn.Module, shared: SequenceParallel | None, group: str) -> nn.Module:
    shares, back = (shared.ranks, shared.gathered) if shared else (1, None)

    def forward(layer: nn.Module, rows: Tensor) -> Tensor:
        weight = layer.weight.to_local() if isinstance(layer.weight, DTensor) else layer.weight
        product = _Factors.apply(rows, weight)
        outputs: Tensor = _Reduced.apply(product, rows.detach(), weight.detach(), shares, group, back)
        return outputs if layer.bias is None else outputs + layer.bias.to(outputs.dtype)

    return with_forward(module, forward)


@torch.library.custom_op("vlmpipe::reduced_product", mutates_args=())
def reduced_product(rows: Tensor, weight: Tensor, shares: int, group: str) -> Tensor:
    """`rows @ weight.T` summed over the ranks of the process group named `group`; "" traces one rank alone.

    (sequences, tokens, inputs) -> (sequences, tokens / shares, outputs), see `SequenceParallel`.
    """
    product = F.linear(rows, weight)
    name: Any = group  # a type of its own in torch 2.13
    of_ranks = _resolve_process_group(name) if group else None
    if shares > 1:
        return SequenceParallel(shares, group=of_ranks).summed(product)
    if of_ranks:
        dist.all_reduce(product, group=of_ranks)
    return product


@reduced_product.register_fake
def _(rows: Tensor, weight: Tensor, shares: int, group: str) -> Tensor:
    return rows.new_empty(*rows.shape[:-2], rows.shape[-2] // shares, weight.shape[0])


PRODUCTS.append(torch.ops.vlmpipe.reduced_product.default)


class _Context(Protocol):
    """Context that autograd passes from the forward to the backward pass."""

    back: Callable[[Tensor], Tensor] | None
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor) -> None: ...


class _Factors(torch.autograd.Function):
    """Saves the factors of a product that is yet to be computed, and computes their gradients. Its output has the
    product's shape and no values.

    Recomputation of a layer ends with the last tensor that was saved: before the layer's last product, not after it.
    """

    @staticmethod
    def forward(ctx: _Context, rows: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return rows.new_empty(()).expand(*rows.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: _Context, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        rows, weight = ctx.saved_tensors
        of_sequences = gradient @ weight if ctx.needs_input_grad[0] else None
        of_weight = gradient.flatten(0, -2).t() @ rows.flatten(0, -2) if ctx.needs_input_grad[1] else None
        return of_sequences, of_weight


class _Reduced(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context,
        _product: Tensor,
        rows: Tensor,
        weight: Tensor,
        shares: int,
        group: str,
        back: Callable[[Tensor], Tensor] | None,
    ) -> Tensor:
        ctx.back = back
        return reduced_product(rows, weight, shares, group)

    @staticmethod
    def backward(ctx: _Context, gradient: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        return ctx.back(gradient) if ctx.back else gradient, None, None, None, None, None
