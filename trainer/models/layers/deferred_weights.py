"""Builds a model without its weights, and reads these part by part when parts are sharded.

A rank that builds a model whole needs 4 bytes a parameter of the machine's memory, eight ranks eight times that. Here
it holds one layer at a time, and its own shards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from vlmpipe.trainer.models.layers.freeze import plain_name
from vlmpipe.trainer.models.layers.lora import MAGNITUDE, row_lengths

if TYPE_CHECKING:
    from vlmpipe.trainer.models.base import Weights


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules made inside have their parameters on the meta device, and real buffers: rotary frequencies and the like
    are computed in constructors and stored in no file."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register


class DeferredWeights:
    """The values of a model's parameters on the meta device."""

    def __init__(self, model: nn.Module, weights: Weights, device: torch.device) -> None:
        """`weights`: by names in the model without adapters."""
        self._weights, self._device = weights, device
        self._names = {id(parameter): plain_name(name) for name, parameter in model.named_parameters()}

    def fill(self, module: nn.Module) -> None:
        """Give the parameters of `module` that have no values theirs, on the device and in their types. They remain the
        same objects, also where two modules share one."""
        with torch.random.fork_rng(devices=[]):  # some weights are drawn when they are read
            for parameter in module.parameters():
                if parameter.is_meta:
                    value = self._read(self._names[id(parameter)]).to(self._device, parameter.dtype)
                    torch.utils.swap_tensors(parameter, nn.Parameter(value, requires_grad=parameter.requires_grad))

    def _read(self, name: str) -> Tensor:
        if name.endswith(MAGNITUDE):  # of an adapter without effect yet
            return row_lengths(self._weights.read(f"{name.removesuffix(MAGNITUDE)}.weight"))
        return self._weights.read(name)
