"""The vision encoder of a transformers model of any type: its layers, its parameters' names, its rounded output."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import ModelOutput

from vlmpipe.trainer.models.layers.freeze import part_of


def encoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """The vision encoder of a transformers model."""
    return model.get_encoder(modality="image")


def layers_of(encoder: nn.Module) -> list[nn.Module]:
    """The encoder's own layers: its longest list of modules of one class."""
    lists = [list(part) for part in encoder.modules() if isinstance(part, nn.ModuleList)]
    return max((one for one in lists if len({type(layer) for layer in one}) == 1), key=len, default=[])


def names_from_end(model: PreTrainedModel) -> dict[str, str]:
    """Parameters of the vision encoder, whose layers count from the last one, -1 -> their names in the model."""
    encoder = encoder_of(model)
    modules = {module: name for name, module in model.named_modules()}
    layers = layers_of(encoder)
    count = len(layers)
    starts = {f"{modules[layer]}.": f"{number - count}." for number, layer in enumerate(layers)}
    found = {}
    for name in (f"{modules[encoder]}.{inner}" for inner, _ in encoder.named_parameters()):
        start = next((one for one in starts if name.startswith(one)), "")
        found[starts[start] + name.removeprefix(start) if start else name] = name
    return found


def has_merger(encoder: nn.Module) -> bool:
    """Return whether part of the encoder is a projector, as in Qwen-VL's."""
    return any(part_of(f"visual.{name}") == "projector" for name, _ in encoder.named_parameters())


def round_output(_encoder: nn.Module, _inputs: object, output: ModelOutput) -> object:
    """A frozen encoder's output as the feature cache stores it: in bf16.

    A copy: the library writes its projected features into the output that it gets.
    """
    rounded = copy.copy(output)
    for name, value in output.items():
        rounded[name] = _rounded(value)
    return rounded


def _rounded(value: object) -> object:
    if isinstance(value, list | tuple):
        return type(value)(_rounded(one) for one in value)
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.to(torch.bfloat16).to(value.dtype)
    return value


def fewer_layers(text: PreTrainedConfig, count: int) -> None:
    """Have a language model keep its first layers, in all fields that have an entry for each layer."""
    before = int(text.num_hidden_layers)
    for name, value in text.to_dict().items():
        if isinstance(value, list) and len(value) == before:
            setattr(text, name, value[:count])
    text.num_hidden_layers = count
    if getattr(text, "num_kv_shared_layers", 0) and count < before:
        text.num_kv_shared_layers = 0
