"""A model's language layers on several devices of one process, to answer questions that no single device has room for.

The rest of the model sees its first device only: hooks bring a layer's inputs to the layer's device, and its output
back. So devices work one after another, as one large device would, and each layer's keys and values stay beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers import Cache, PreTrainedModel

from vlmpipe.trainer.models.attention.cu_seqlens import CuSeqlens
from vlmpipe.trainer.sizing.device_spread import devices_of_layers


def language_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder layers of a transformers model."""
    return list(model.get_decoder().layers)


def spread(model: nn.Module, devices: Sequence[torch.device]) -> nn.Module:
    """Move the model to the devices, in place. With one device this is a move and nothing else."""
    if len(devices) == 1:
        return model.to(devices[0])
    layers = language_layers(model)
    sizes = [_bytes(layer) for layer in layers]
    places = devices_of_layers(_bytes(model) - sum(sizes), sizes, len(devices))
    device_of: dict[int, torch.device] = {}  # of tensors that are not on the first device, by id
    for layer, place in zip(layers, places, strict=True):
        if place:
            device_of |= dict.fromkeys(map(id, _tensors(layer)), devices[place])
            layer.register_forward_pre_hook(_inputs_to(devices[place]), with_kwargs=True)
            layer.register_forward_hook(_output_to(devices[0]))
    _move(model, device_of, devices[0])
    return model


def _move(model: nn.Module, device_of: Mapping[int, torch.device], other: torch.device) -> None:
    """Move each tensor to its device, those without one to `other`; tensors of several modules remain shared."""
    moved: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            key = id(parameter)
            if key not in moved:
                value = parameter.detach().to(device_of.get(key, other))
                moved[key] = nn.Parameter(value, requires_grad=parameter.requires_grad)
            module.register_parameter(name, moved[key])
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to(device_of.get(id(buffer), other)))


def _inputs_to(device: torch.device) -> object:
    return lambda _layer, args, kwargs: _moved((args, kwargs), device)


def _output_to(device: torch.device) -> object:
    return lambda _layer, _args, output: _moved(output, device)


def _moved(values: object, device: torch.device) -> object:
    """Tensors in these values, moved. A cache of keys and values stays what it is: each layer's are where it is."""

    def move(value: object) -> object:
        return value.to(device) if isinstance(value, Tensor | CuSeqlens) else value

    return tree_map(move, values, is_leaf=lambda value: isinstance(value, Cache))


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _bytes(module: nn.Module) -> int:
    return sum(
        module_tensor.numel() * module_tensor.element_size()
        for module_tensor in {id(tensor): tensor for tensor in _tensors(module)}.values()
    )
