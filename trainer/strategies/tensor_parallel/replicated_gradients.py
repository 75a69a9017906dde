"""Gradients of parameters that tensor-parallel ranks hold whole, each its own copy.

Nothing else keeps the copies equal, and checkpoints hold one of them. Where each rank uses a parameter on a part (its
heads, its tokens), it has a part of the gradient: the sum is the whole. Where all ranks compute the same, their
gradients may still differ in the last bits, because kernels add in the order in which their blocks end (backward passes
of attention and of indexing): the mean is taken, or the copies would drift apart step by step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

Parameter = tuple[nn.Module, str]  # owner and name, since FSDP replaces the parameter object
MAX_BYTES = 64 << 20  # of small gradients that are reduced together


class ReplicatedGradients:
    """Gradients of a module's parameters that tensor-parallel ranks replicate. Create it before FSDP shards the module.

    partial: see `vlmpipe.trainer.strategies.tensor_parallel.plan.parallelize`. group: the tensor-parallel ranks.
    """

    def __init__(self, module: nn.Module, partial: Sequence[Parameter], group: ProcessGroup) -> None:
        self._group, self._partial = group, list(partial)
        summed = {owner.get_parameter(name) for owner, name in partial}
        self._same = [place for place in _trained(module) if place[0].get_parameter(place[1]) not in summed]

    def combine(self) -> None:
        """Give all ranks of the group the same gradients. Collective."""
        _all_reduce(_gradients(self._partial), self._group)
        if same := _gradients(self._same):  # else all that is trained is sharded, or used in part
            torch._foreach_div_(same, self._group.size())
            _all_reduce(same, self._group)


def _trained(module: nn.Module) -> Iterator[Parameter]:
    """Trained parameters that are not sharded, each once."""
    seen: set[nn.Parameter] = set()
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            if parameter.requires_grad and not isinstance(parameter, DTensor) and parameter not in seen:
                seen.add(parameter)
                yield owner, name


def _gradients(places: Iterable[Parameter]) -> list[Tensor]:
    """This rank's shards of the gradients."""
    gradients = [owner.get_parameter(name).grad for owner, name in places]
    return [
        gradient.to_local() if isinstance(gradient, DTensor) else gradient
        for gradient in gradients
        if gradient is not None
    ]


def _all_reduce(gradients: Iterable[Tensor], group: ProcessGroup) -> None:
    """Sum in place, small tensors together."""
    small: list[Tensor] = []
    for gradient in gradients:
        if gradient.nbytes >= MAX_BYTES and gradient.is_contiguous():
            dist.all_reduce(gradient, group=group)
            continue
        if sum(queued.nbytes for queued in small) + gradient.nbytes > MAX_BYTES:
            _all_reduce_together(small, group)
            small = []
        small.append(gradient)
    _all_reduce_together(small, group)


def _all_reduce_together(gradients: Sequence[Tensor], group: ProcessGroup) -> None:
    if not gradients:
        return
    together = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(together, group=group)
    for gradient, total in zip(gradients, together.split([tensor.numel() for tensor in gradients]), strict=True):
        gradient.copy_(total.view_as(gradient))
