"""Flat gradient buffers, all-reduced over data-parallel ranks while the backward pass runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from trainer.sizing.gradient_buckets import MIB, TORCH_BUCKET_MIB

BUCKET_ELEMENTS = TORCH_BUCKET_MIB * MIB // 4  # DDP's size, in fp32


class GradientBuckets:
    """Makes the gradients of `parameters` views of a few buffers, which are all-reduced over `group`.

    Unlike DDP it takes DTensors, whose shards must be the same on all ranks of the group.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: ProcessGroup) -> None:
        self._group, self._is_alone = group, group.size() == 1
        self._buffers: list[Tensor] = []
        self._sizes: list[int] = []  # parameters in each
        self._missing: list[int] = []  # gradients still to come, by bucket; empty while nothing is to be sent
        self._sent: list[dist.Work] = []
        for number, bucket in enumerate(_buckets(list(reversed(parameters)))):  # the backward pass begins at the end
            self._sizes.append(len(bucket))
            self._buffers.append(_attach(bucket))
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(lambda _, number=number: self._arrived(number))

    def expect_last(self, passes: int = 1) -> None:
        """Send each bucket when the next `passes` backward passes have completed its gradients."""
        self._missing, self._sent = [passes * size for size in self._sizes], []

    def wait(self) -> None:
        """Wait until all gradients are summed over the group."""
        self._send(ready_only=False)  # some parameters may have had no gradient
        for work in self._sent:
            work.wait()
        self._missing = []

    def _arrived(self, number: int) -> None:
        if self._missing:
            self._missing[number] -= 1
            self._send(ready_only=True)

    def _send(self, *, ready_only: bool) -> None:
        """Send in the same order on all ranks, whatever order the gradients complete in."""
        if self._is_alone:
            return
        while len(self._sent) < len(self._buffers) and not (ready_only and self._missing[len(self._sent)]):
            work = dist.all_reduce(self._buffers[len(self._sent)], group=self._group, async_op=True)
            assert work is not None
            self._sent.append(work)


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    bucket: list[nn.Parameter] = []
    elements = 0
    for parameter in parameters:
        bucket.append(parameter)
        elements += _local(parameter).numel()
        if elements >= BUCKET_ELEMENTS:
            yield bucket
            bucket, elements = [], 0
    if bucket:
        yield bucket


def _attach(bucket: Sequence[nn.Parameter]) -> Tensor:
    """Allocate a zeroed buffer and make its parts the gradients."""
    parts = [_local(parameter) for parameter in bucket]
    buffer = torch.zeros(sum(part.numel() for part in parts), device=parts[0].device)
    for parameter, part, flat in zip(bucket, parts, buffer.split([part.numel() for part in parts]), strict=True):
        gradient = flat.view_as(part)
        if isinstance(parameter, DTensor):
            gradient = DTensor.from_local(
                gradient,
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
        parameter.grad = gradient
    return buffer


def _local(parameter: nn.Parameter) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
