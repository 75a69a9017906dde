"""Sharding styles of modules for `parallelize_module` (scheme: Shoeybi et al. 2019, arXiv 1909.08053).

Parameters become DTensors, which keep the whole shape for the optimizer, checkpoints and FSDP. Computation uses plain
tensors: DTensor plans each operation again for every shape, and the number of labels differs in each micro-batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn import functional as F

from vlmpipe.trainer.models.loss.chunked_loss import chunked_losses, on_this_rank, trained_rows_of

SCALE = "embed_scale"  # buffer of embeddings that multiply what they look up (Gemma)
FUSED = 3  # queries, keys and values in one product


class ShardingStyle(ParallelStyle):
    """How one module of a layer is sharded."""

    def cut(self, module: nn.Module, ranks: int) -> None:
        """Reduce the module to the first rank's shard, without other ranks."""


class CopyToModelParallelRegion(ShardingStyle):
    """A module around sharded ones with a replicated input, whose gradient is all-reduced once."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group = device_mesh.get_group()
        return mark_input(module, lambda hidden: _CopyToModelParallel.apply(hidden, group))


class CopyToModelParallelHeads(CopyToModelParallelRegion):
    """CopyToModelParallelRegion for attention that reshapes by `num_heads`, which becomes this rank's number."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.cut(module, device_mesh.size())
        return super()._apply(module, device_mesh)

    def cut(self, module: nn.Module, ranks: int) -> None:
        module.num_heads //= ranks


class ColwiseLinear(ShardingStyle):
    """Column-parallel linear layer: (..., inputs) -> (..., this rank's outputs)."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _shard_parameter(module, "weight", device_mesh, Shard(0))
        if module.bias is not None:
            _shard_parameter(module, "bias", device_mesh, Shard(0))
        return with_forward(module, _computed_outputs)

    def cut(self, module: nn.Module, ranks: int) -> None:
        for parameter in module.parameters():
            parameter.data = parameter.data.chunk(ranks)[0].clone()


class ColwiseFusedLinear(ShardingStyle):
    """Column-parallel fused query-key-value layer: (..., inputs) -> (..., 3 x this rank's outputs).

    A rank's rows of the weight are not contiguous; see trainer/strategies/tensor_pieces.py.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, _ in list(module.named_parameters(recurse=False)):
            _shard_parameter(module, name, device_mesh, _StridedShard(0, split_factor=FUSED))
        return with_forward(module, _computed_outputs)

    def cut(self, module: nn.Module, ranks: int) -> None:
        for parameter in module.parameters():
            parameter.data = parameter.data.unflatten(0, (FUSED, -1)).chunk(ranks, dim=1)[0].flatten(0, 1).clone()


class PartialSum(ShardingStyle):
    """Linear layer over this rank's inputs: (..., this rank's inputs) -> (..., outputs), not yet summed over ranks and
    without bias."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _shard_parameter(module, "weight", device_mesh, Shard(1))
        return with_forward(module, lambda layer, rows: F.linear(rows, _local(layer.weight)))

    def cut(self, module: nn.Module, ranks: int) -> None:
        module.weight.data = module.weight.data.chunk(ranks, dim=1)[0].clone()


class ReduceFromModelParallelRegion(ShardingStyle):
    """All-reduces the output of an adapted linear layer, then adds its bias."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group = device_mesh.get_group()
        return sum_output(module, lambda part: _ReduceFromModelParallel.apply(part, group))


class ShardedDropout(ShardingStyle):
    """Dropout of a sharded tensor. Ranks share a random state, so each takes its part of the whole tensor's mask;
    otherwise every part would drop the same positions."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return _with_own_dropout(module, device_mesh.size(), device_mesh.get_local_rank())

    def cut(self, module: nn.Module, ranks: int) -> None:
        _with_own_dropout(module, ranks, 0)


class VocabParallelEmbedding(ParallelStyle):
    """Embedding sharded by vocabulary: (...) token ids -> (..., hidden), replicated."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        first = first_row(module.weight.shape[0], device_mesh)
        _shard_parameter(module, "weight", device_mesh, Shard(0))
        group = device_mesh.get_group()

        def forward(embedding: nn.Module, tokens: Tensor) -> Tensor:
            weight = _local(embedding.weight)
            rows, is_mine = on_this_rank(tokens, first, len(weight))
            local_rows = F.embedding(rows, weight).masked_fill_(~is_mine.unsqueeze(-1), 0.0)
            embedded: Tensor = _ReduceFromModelParallel.apply(local_rows, group)
            scale = getattr(embedding, SCALE, None)
            return embedded if scale is None else embedded * scale.to(embedded.dtype)

        return with_forward(module, forward)


class VocabParallelLoss(ParallelStyle):
    """Cross-entropy of each label, of a head sharded by vocabulary."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self._vocabulary = vocabulary

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        first, group = first_row(self._vocabulary, device_mesh), device_mesh.get_group()

        def of_logits(logits: Tensor, label_ids: Tensor) -> Tensor:
            losses: Tensor = _VocabParallelCrossEntropy.apply(logits, label_ids, first, group)
            return losses

        module.of_logits = of_logits
        return module


class ChunkedHeadLoss(ParallelStyle):
    """A head sharded by vocabulary that computes the loss itself, one chunk of labels at a time."""

    def __init__(self, chunk_tokens: int) -> None:
        super().__init__()
        self._chunk_tokens = chunk_tokens

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        first, group = first_row(module.weight.shape[0], device_mesh), device_mesh.get_group()
        _shard_parameter(module, "weight", device_mesh, Shard(0))

        def forward(layer: nn.Module, hidden: Tensor, label_ids: Tensor) -> tuple[Tensor, Tensor]:
            weight, rows = _local(layer.weight), trained_rows_of(layer)
            return chunked_losses(hidden, weight, label_ids, self._chunk_tokens, first=first, group=group, rows=rows)

        return with_forward(module, forward)


def first_row(rows: int, mesh: DeviceMesh) -> int:
    """First of this rank's rows under DTensor's sharding: equal shards but for the last."""
    return min(rows, mesh.get_local_rank() * -(-rows // mesh.size()))


def linear_of(module: nn.Module) -> nn.Module:
    """The base layer of an adapted linear layer, or the layer itself."""
    return module.get_base_layer() if hasattr(module, "get_base_layer") else module


def mark_input(module: nn.Module, mark: Callable[[Tensor], Tensor]) -> nn.Module:
    """Apply `mark` to the module's hidden states: its first argument, positional or by keyword."""

    def marked(_module: nn.Module, args: Any, kwargs: Any) -> tuple[object, object]:
        if args:
            return (mark(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": mark(kwargs["hidden_states"])}

    module.register_forward_pre_hook(marked, with_kwargs=True)
    return module


def sum_output(module: nn.Module, add_up: Callable[[Tensor], Tensor]) -> nn.Module:
    """Apply `add_up` to the module's output, then add the bias once."""
    linear = linear_of(module)

    def summed(_module: nn.Module, _args: object, part: Tensor) -> Tensor:
        outputs = add_up(part)
        return outputs if linear.bias is None else outputs + linear.bias.to(outputs.dtype)

    module.register_forward_hook(summed)
    return module


def _shard_parameter(module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement) -> None:
    whole = module.get_parameter(name)
    if not isinstance(whole, DTensor):  # a tied weight is sharded already
        split = nn.Parameter(_distributed(whole.detach(), mesh, placement), requires_grad=whole.requires_grad)
        module.register_parameter(name, split)


def _distributed(whole: Tensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
    if not isinstance(placement, _StridedShard):
        return distribute_tensor(whole, mesh, [placement])
    parts = whole.unflatten(0, (placement.split_factor, -1))
    shard = distribute_tensor(parts, mesh, [Shard(1)]).to_local().flatten(0, 1).clone()
    return DTensor.from_local(shard, mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride())


def _computed_outputs(layer: nn.Module, rows: Tensor) -> Tensor:
    return F.linear(rows, _local(layer.weight), None if layer.bias is None else _local(layer.bias))


def _with_own_dropout(module: nn.Module, ranks: int, number: int) -> nn.Module:
    def forward(dropout: nn.Module, rows: Tensor) -> Tensor:
        if not (dropout.training and isinstance(dropout, nn.Dropout)):
            return rows
        of_all = F.dropout(rows.new_ones(*rows.shape[:-1], ranks * rows.shape[-1]), dropout.p)
        return rows * of_all.chunk(ranks, dim=-1)[number].contiguous()  # a view would keep the whole mask

    return with_forward(module, forward)


def with_forward(module: nn.Module, forward: Callable[..., object]) -> nn.Module:
    module.forward = functools.partial(forward, module)
    return module


def _local(parameter: Tensor) -> Tensor:
    assert isinstance(parameter, DTensor)
    return parameter.to_local()


class _GroupContext(FunctionCtx):
    """Values saved for the backward pass."""

    group: ProcessGroup


class _CopyToModelParallel(torch.autograd.Function):
    """Identity forward, all-reduce backward: in place, since only linear layers consume it and nothing else holds their
    gradient."""

    @staticmethod
    def forward(ctx: _GroupContext, tensor: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: _GroupContext, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _ReduceFromModelParallel(torch.autograd.Function):
    """In-place all-reduce forward, identity backward."""

    @staticmethod
    def forward(ctx: FunctionCtx, tensor: Tensor, group: ProcessGroup) -> Tensor:
        ctx.mark_dirty(tensor)
        dist.all_reduce(tensor, group=group)
        return tensor

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _LossContext(FunctionCtx):
    """Values saved for the backward pass."""

    saved_tensors: tuple[Tensor, ...]


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Every rank returns all losses, (labels,), and computes the gradient of its own logits."""

    @staticmethod
    def forward(ctx: _LossContext, logits: Tensor, label_ids: Tensor, first: int, group: ProcessGroup) -> Tensor:
        largest = logits.amax(dim=-1)  # (labels,)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        columns, is_mine = on_this_rank(label_ids, first, logits.shape[1])
        label_logits = (logits.gather(1, columns.unsqueeze(1)).squeeze(1) - largest).masked_fill(~is_mine, 0.0)
        scores = (logits - largest.unsqueeze(1)).exp_()  # (labels, tokens of this rank)
        sums = torch.stack([scores.sum(dim=-1), label_logits])
        dist.all_reduce(sums, group=group)
        ctx.save_for_backward(scores.div_(sums[0].unsqueeze(1)), columns, is_mine)
        return sums[0].log() - sums[1]

    @staticmethod
    def backward(ctx: _LossContext, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, columns, is_mine = ctx.saved_tensors
        of_logits = probabilities * gradient.unsqueeze(1)
        labels = torch.arange(len(columns), device=columns.device)
        of_logits[labels, columns] -= is_mine * gradient
        return of_logits, None, None, None
