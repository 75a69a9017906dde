"""Sharding styles of modules for `parallelize_module`.

Parameters become DTensors, which keeps their whole shape for the optimizer, for checkpoints and for FSDP. What is
computed is computed on plain tensors: DTensor's own operations plan anew for every shape that they meet, and the number
of labels is another in each micro-batch. Shoeybi et al. 2019 (arXiv 1909.08053) has the scheme.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn import functional as F

from trainer.models.layers.chunked_loss import chunked_loss, on_this_rank

FUSED = 3  # parts of a product that gives queries, keys and values


class ShardingStyle(ParallelStyle):
    """How a module of a layer is split."""

    def cut(self, module: nn.Module, ranks: int) -> None:
        """Leave of the module what the first rank has of it, without other ranks."""


class CopyToModelParallelRegion(ShardingStyle):
    """A module around split ones. All ranks give it the same input, whose gradient is summed over them: once, however
    many split layers take it."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group = device_mesh.get_group()
        return mark_input(module, lambda hidden: _CopyToModelParallel.apply(hidden, group))


class CopyToModelParallelHeads(CopyToModelParallelRegion):
    """The same for attention that lays out its heads by their number: this rank's are fewer."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.cut(module, device_mesh.size())
        return super()._apply(module, device_mesh)

    def cut(self, module: nn.Module, ranks: int) -> None:
        module.num_heads //= ranks


class ColwiseLinear(ShardingStyle):
    """A linear layer of which each rank computes some outputs: (..., inputs) -> (..., outputs of this rank)."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _shard_parameter(module, "weight", device_mesh, Shard(0))
        if module.bias is not None:
            _shard_parameter(module, "bias", device_mesh, Shard(0))
        return _with_forward(module, _computed_outputs)

    def cut(self, module: nn.Module, ranks: int) -> None:
        for parameter in module.parameters():
            parameter.data = parameter.data.chunk(ranks)[0].clone()


class ColwiseFusedLinear(ShardingStyle):
    """A linear layer that computes queries, keys and values in one product, one after the other: each rank computes
    those of its heads, (..., inputs) -> (..., 3 x outputs of this rank).

    Its rows of the weight do not lie side by side, so checkpoints take them in pieces
    (trainer/strategies/strided_checkpoint.py).
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, _ in list(module.named_parameters(recurse=False)):
            _shard_parameter(module, name, device_mesh, _StridedShard(0, split_factor=FUSED))
        return _with_forward(module, _computed_outputs)

    def cut(self, module: nn.Module, ranks: int) -> None:
        for parameter in module.parameters():
            parameter.data = parameter.data.unflatten(0, (FUSED, -1)).chunk(ranks, dim=1)[0].flatten(0, 1).clone()


class PartialSum(ShardingStyle):
    """A linear layer that takes what each rank has: (..., inputs of this rank) -> (..., outputs), to be summed over
    ranks. Its bias is left to whoever sums."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _shard_parameter(module, "weight", device_mesh, Shard(1))
        return _with_forward(module, lambda layer, rows: F.linear(rows, _local(layer.weight)))

    def cut(self, module: nn.Module, ranks: int) -> None:
        module.weight.data = module.weight.data.chunk(ranks, dim=1)[0].clone()


class ReduceFromModelParallelRegion(ShardingStyle):
    """A module whose output is summed over ranks, and then gets the bias of its linear layer: one that is adapted."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group = device_mesh.get_group()
        return sum_output(module, lambda part: _ReduceFromModelParallel.apply(part, group))


class RowwiseLinear(PartialSum):
    """A linear layer that takes what each rank has: (..., inputs of this rank) -> (..., outputs), equal on all."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return ReduceFromModelParallelRegion()._apply(super()._apply(module, device_mesh), device_mesh)


class ShardedDropout(ShardingStyle):
    """Dropout of what each rank has a part of. Ranks draw the same numbers: from those for all of it each takes its
    own, or the same places would be dropped out in every part."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return _with_own_dropout(module, device_mesh.size(), device_mesh.get_local_rank())

    def cut(self, module: nn.Module, ranks: int) -> None:
        _with_own_dropout(module, ranks, 0)


class VocabParallelEmbedding(ParallelStyle):
    """An embedding of which each rank has some rows: (...) token numbers -> (..., hidden), equal on all ranks."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        first = first_row(module.weight.shape[0], device_mesh)
        _shard_parameter(module, "weight", device_mesh, Shard(0))
        group = device_mesh.get_group()

        def forward(embedding: nn.Module, tokens: Tensor) -> Tensor:
            weight = _local(embedding.weight)
            rows, is_mine = on_this_rank(tokens, first, len(weight))
            found = F.embedding(rows, weight).masked_fill_(~is_mine.unsqueeze(-1), 0.0)
            embedded: Tensor = _ReduceFromModelParallel.apply(found, group)
            return embedded

        return _with_forward(module, forward)


class VocabParallelLoss(ParallelStyle):
    """The summed cross-entropy of a head of which each rank computes the logits of some tokens."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self._vocabulary = vocabulary

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        first, group = first_row(self._vocabulary, device_mesh), device_mesh.get_group()

        def forward(_module: nn.Module, head: nn.Module, hidden: Tensor, label_ids: Tensor) -> Tensor:
            loss: Tensor = _VocabParallelCrossEntropy.apply(head(hidden).float(), label_ids, first, group)
            return loss

        return _with_forward(module, forward)


class ChunkedHeadLoss(ParallelStyle):
    """A head that computes the loss itself, a chunk of labels at a time, of which each rank has some tokens."""

    def __init__(self, chunk_tokens: int) -> None:
        super().__init__()
        self._chunk_tokens = chunk_tokens

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        first, group = first_row(module.weight.shape[0], device_mesh), device_mesh.get_group()
        _shard_parameter(module, "weight", device_mesh, Shard(0))

        def forward(layer: nn.Module, hidden: Tensor, label_ids: Tensor) -> Tensor:
            return chunked_loss(hidden, _local(layer.weight), label_ids, self._chunk_tokens, first=first, group=group)

        return _with_forward(module, forward)


def first_row(rows: int, mesh: DeviceMesh) -> int:
    """Where this rank's part of `rows` rows begins: parts are equal but for the last, as DTensor has them."""
    return min(rows, mesh.get_local_rank() * -(-rows // mesh.size()))


def linear_of(module: nn.Module) -> nn.Module:
    """The linear layer in an adapted one, or that which is not."""
    return module.get_base_layer() if hasattr(module, "get_base_layer") else module


def mark_input(module: nn.Module, mark: Callable[[Tensor], Tensor]) -> nn.Module:
    """Have the module take `mark` of the hidden states that it is given: its first argument, however it is passed."""

    def marked(_module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if args:
            return (mark(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": mark(kwargs["hidden_states"])}

    module.register_forward_pre_hook(marked, with_kwargs=True)
    return module


def sum_output(module: nn.Module, add_up: Callable[[Tensor], Tensor]) -> nn.Module:
    """Have `add_up` sum the module's output over ranks before the bias is added, which would count once for each."""
    linear = linear_of(module)

    def summed(_module: nn.Module, _args: Any, part: Tensor) -> Tensor:
        outputs = add_up(part)
        return outputs if linear.bias is None else outputs + linear.bias.to(outputs.dtype)

    module.register_forward_hook(summed)
    return module


def _shard_parameter(module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement) -> None:
    whole = module.get_parameter(name)
    if not isinstance(whole, DTensor):  # a tied one is split already
        split = nn.Parameter(_distributed(whole.detach(), mesh, placement), requires_grad=whole.requires_grad)
        module.register_parameter(name, split)


def _distributed(whole: Tensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
    if not isinstance(placement, _StridedShard):
        return distribute_tensor(whole, mesh, [placement])
    parts = whole.unflatten(0, (placement.split_factor, -1))  # of each, a rank has its share
    own = distribute_tensor(parts, mesh, [Shard(1)]).to_local().flatten(0, 1).clone()
    return DTensor.from_local(own, mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride())


def _computed_outputs(layer: nn.Module, rows: Tensor) -> Tensor:
    return F.linear(rows, _local(layer.weight), None if layer.bias is None else _local(layer.bias))


def _with_own_dropout(module: nn.Module, ranks: int, number: int) -> nn.Module:
    def forward(dropout: nn.Module, rows: Tensor) -> Tensor:
        if not (dropout.training and isinstance(dropout, nn.Dropout)):
            return rows
        of_all = F.dropout(rows.new_ones(*rows.shape[:-1], ranks * rows.shape[-1]), dropout.p)
        return rows * of_all.chunk(ranks, dim=-1)[number].contiguous()  # not to keep those of others

    return _with_forward(module, forward)


def _with_forward(module: nn.Module, forward: Any) -> nn.Module:
    module.forward = functools.partial(forward, module)
    return module


def _local(parameter: Tensor) -> Tensor:
    assert isinstance(parameter, DTensor)
    return parameter.to_local()


class _CopyToModelParallel(torch.autograd.Function):
    """As it is forward; the gradients of all ranks summed. What takes it are linear layers, whose gradient nobody else
    holds: it may be summed in place."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _ReduceFromModelParallel(torch.autograd.Function):
    """Summed over ranks forward, in place; each rank's part has the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        ctx.mark_dirty(tensor)
        dist.all_reduce(tensor, group=group)
        return tensor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Every rank returns the whole loss and gives its own logits their gradient."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, label_ids: Tensor, first: int, group: ProcessGroup) -> Tensor:
        largest = logits.amax(dim=-1)  # (labels,)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        columns, is_mine = on_this_rank(label_ids, first, logits.shape[1])
        wanted = (logits.gather(1, columns.unsqueeze(1)).squeeze(1) - largest).masked_fill(~is_mine, 0.0)
        scores = (logits - largest.unsqueeze(1)).exp_()  # (labels, tokens of this rank)
        sums = torch.stack([scores.sum(dim=-1), wanted])
        dist.all_reduce(sums, group=group)
        ctx.save_for_backward(scores.div_(sums[0].unsqueeze(1)), columns, is_mine)
        return (sums[0].log() - sums[1]).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, columns, is_mine = ctx.saved_tensors
        of_logits = probabilities * gradient
        labels = torch.arange(len(columns), device=columns.device)
        of_logits[labels, columns] -= is_mine * gradient
        return of_logits, None, None, None
