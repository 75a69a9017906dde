"""Keeps the inputs of recomputed layers in the machine's memory (`train.activation_offloading`).

Each is copied there while its layer runs, and back while the layer after it is recomputed. On a GPU copies run on a
stream of their own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks


@dataclass(eq=False)
class OffloadedInput:
    """The input of one layer. It is on the device until the next layer begins, and again ahead of its use."""

    host: Tensor
    on_device: Tensor | None
    copied: object  # event after its last copy
    before: Callable[[], OffloadedInput | None]  # the previous layer's, while it is needed


class ActivationOffload:
    """Saves what a checkpointing function saves outside of its layer, which is the layer's input, in host memory."""

    def __init__(self) -> None:
        self._last: Callable[[], OffloadedInput | None] = lambda: None
        self._device: torch.device | None = None

    def around(self, checkpoint: Callable[..., object]) -> Callable[..., object]:
        """`checkpoint`, with its input offloaded."""

        def offloaded(layer: Callable[..., object], *inputs: object) -> object:
            with saved_tensors_hooks(self._save, self._load):
                return checkpoint(layer, *inputs)

        return offloaded

    def _save(self, tensor: Tensor) -> OffloadedInput:
        if self._device != tensor.device:
            self._device = tensor.device
            self._streams: ModuleType = torch.get_device_module(tensor.device)  # torch.cpu has a single stream
            self._own = self._streams.Stream()
        before = self._last()
        if before is not None:  # its memory is free when its copy is done, which the last layer has hidden
            self._streams.current_stream().wait_event(before.copied)
            before.on_device = None
        # In a trace `meta` stands for the machine's memory.
        place = "meta" if isinstance(tensor, FakeTensor) else "cpu"
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device=place, pin_memory=tensor.is_cuda)
        entry = OffloadedInput(host, tensor, self._copy(host, tensor), self._last)
        self._last = weakref.ref(entry)
        return entry

    def _load(self, entry: OffloadedInput) -> Tensor:
        self._last = entry.before
        before = entry.before()
        for inputs in (entry, before):
            if inputs is not None and inputs.on_device is None:
                inputs.on_device = torch.empty(inputs.host.shape, dtype=inputs.host.dtype, device=self._device)
                inputs.copied = self._copy(inputs.on_device, inputs.host)
        self._streams.current_stream().wait_event(entry.copied)
        tensor, entry.on_device = entry.on_device, None
        assert tensor is not None
        return tensor

    def _copy(self, target: Tensor, source: Tensor) -> object:
        self._own.wait_stream(self._streams.current_stream())
        with self._streams.stream(self._own):
            if not isinstance(source, FakeTensor):
                target.copy_(source, non_blocking=True)
            done = self._streams.Event()
            done.record(self._own)
        return done
