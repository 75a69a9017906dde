"""The vision encoder of a transformers model of any type: its layers, its parameters' names, its rounded output."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from vlmpipe.trainer.models.layers.freeze import part_of

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def encoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """The vision encoder of a transformers model."""
    return model.get_encoder(modality="image")


def layers_of(encoder: nn.Module) -> list[nn.Module]:
    """The encoder's own layers: its longest list of modules of one class, mergers left out."""
    mergers = set(mergers_of(encoder))
    lists = [list(part) for part in encoder.modules() if isinstance(part, nn.ModuleList) and mergers.isdisjoint(part)]
    return max((layers for layers in lists if len({type(layer) for layer in layers}) == 1), key=len, default=[])


def names_from_end(model: PreTrainedModel) -> dict[str, str]:
    """Parameters of the vision encoder, whose layers count from the last one, -1 -> their names in the model."""
    encoder = encoder_of(model)
    modules = {module: name for name, module in model.named_modules()}
    layers = layers_of(encoder)
    count = len(layers)
    starts = {f"{modules[layer]}.": f"{number - count}." for number, layer in enumerate(layers)}
    names = {}
    for name in (f"{modules[encoder]}.{inner}" for inner, _ in encoder.named_parameters()):
        start = next((prefix for prefix in starts if name.startswith(prefix)), "")
        names[starts[start] + name.removeprefix(start) if start else name] = name
    return names


def merger_parts(encoder: nn.Module) -> dict[str, nn.Module]:
    """Parts of a vision encoder that are projectors, as in Qwen-VL's, by name."""
    return {name: part for name, part in encoder.named_children() if part_of(f"visual.{name}") == "projector"}


def mergers_of(encoder: nn.Module) -> list[nn.Module]:
    """The mergers inside of a vision encoder: that of its output, then those of levels (DeepStack). Each joins some
    patches to a token."""
    parts = merger_parts(encoder).values()
    return [merger for part in parts for merger in (part if isinstance(part, nn.ModuleList) else [part])]


def has_merger(encoder: nn.Module) -> bool:
    """Return whether part of the encoder is a projector, under whatever name."""
    return any(part_of(f"visual.{name}") == "projector" for name, _ in encoder.named_parameters())


class Group(nn.Module):
    """Replaces a merger: concatenates the patches of a token, as a merger does first."""

    def __init__(self, patches: int) -> None:
        super().__init__()
        self.patches = patches

    def forward(self, hidden: Tensor) -> Tensor:
        """(patches, hidden) -> (tokens, patches of a token x hidden)."""
        return hidden.reshape(len(hidden) // self.patches, -1)


def patches_of_a_token(encoder: nn.Module) -> int:
    """Return the patches that a merger of the encoder joins, as its configuration says; 1 where it does not."""
    return int(getattr(getattr(encoder, "config", None), "spatial_merge_size", 1)) ** 2


def without_mergers(encoder: nn.Module, patches: int = 0) -> nn.Module:
    """A vision encoder of the same modules that returns the input of its mergers.

    It runs the library's own forward pass, which may order tokens by windows and back. patches: of a token; 0 for
    `patches_of_a_token`.
    """
    tower, group = copy.copy(encoder), Group(patches or patches_of_a_token(encoder))
    tower._modules = dict(encoder._modules)
    for hooks in HOOKS:  # a strategy's hooks on the encoder work on that module only (DeepSpeed's ds_id)
        setattr(tower, hooks, OrderedDict())
    for name, part in merger_parts(encoder).items():
        tower._modules[name] = nn.ModuleList([group for _ in part]) if isinstance(part, nn.ModuleList) else group
    return tower


def merged(rows: Tensor, mergers: Sequence[nn.Module], patches: int) -> list[Tensor]:
    """Tokens of each level, (rows, hidden): what its merger makes of its part of each row, `patches` patches."""
    levels = zip(mergers, rows.chunk(len(mergers), dim=-1), strict=True)
    return [merger(level.reshape(-1, level.shape[-1] // patches)) for merger, level in levels]


def merged_width(encoder: nn.Module) -> int:
    """The numbers of a token in the inputs of all mergers of an encoder: those of their first products."""
    linear = (next(part for part in merger.modules() if isinstance(part, nn.Linear)) for merger in mergers_of(encoder))
    return sum(first.in_features for first in linear)


def round_features(encoder: nn.Module) -> None:
    """Have a frozen encoder round to bf16 what the feature cache would store: its mergers' inputs, or its output."""
    mergers = mergers_of(encoder)
    for merger in mergers:
        merger.register_forward_pre_hook(lambda _, inputs: _rounded(inputs))
    if not mergers:
        encoder.register_forward_hook(round_output)


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
        return type(value)(_rounded(item) for item in value)
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.to(torch.bfloat16).to(value.dtype)
    return value
