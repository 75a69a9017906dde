"""Layers of a model that are quantized: linear layers of the language model's decoder layers, and nothing else.

Vision encoder, projector, embeddings and head keep their type: together they are few of a large model's weights, and
vLLM's kernels for quantized layers are not known to serve them. Mixtures of experts are refused, because transformers
holds experts as one tensor that the format has no layer for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from vlmpipe.trainer.checkpoint.export.published_form import published_form
from vlmpipe.trainer.config.checkpoint import QuantizedFormat
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.models.layers.experts import is_experts

GROUP_SIZES = (128, 64, 32)  # of which vLLM's kernels for 4-bit weights take each
FP8_SIDES = 16  # GPUs multiply matrices of 8-bit floats whose sides are multiples of it
RECURRENT = "linear_attn"  # its state adds up errors of rounding over all tokens


@dataclass(frozen=True)
class QuantizedLayers:
    """stored: names of the layers in published files. left: last names of the parts with all other linear layers.

    group_size: input features with a scale of their own, of 4-bit weights; 0 where an output feature has one scale.
    """

    stored: tuple[str, ...]
    left: tuple[str, ...]
    group_size: int

    def patterns(self) -> list[str]:
        """Regular expressions of the names of layers that are left, in files as in programs, which prefix them."""
        return [f"re:(.*\\.)?{re.escape(name)}(\\..*)?$" for name in self.left]


def quantized_layers(model: PreTrainedModel, form: QuantizedFormat) -> QuantizedLayers:
    """The layers of a model of transformers, which may be on the meta device.

    Raises ConfigError for a model of which none can be quantized, or whose layers have sides that no kernel takes.
    """
    decoder = model.get_decoder()
    if any(is_experts(module) for module in decoder.modules()):
        raise ConfigError(
            "the language model is a mixture of experts",
            expected="a dense one: transformers opens no experts that compressed-tensors has quantized",
        )
    chosen = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and _in_layers(name, model, decoder)
    }
    stored = dict(_stored_names(model, chosen))
    sides = {side for name in stored for side in _sides(chosen[name], form)}
    steps = GROUP_SIZES if form == "int4" else (FP8_SIDES,)
    step = next((step for step in steps if stored and not any(side % step for side in sides)), 0)
    if not step:
        what = f"sides {sorted(sides)}" if stored else "no linear layers that are stored one by one"
        raise ConfigError(
            f"the decoder layers of the language model have {what}",
            expected=f"linear layers whose {'inputs' if form == 'int4' else 'sides'} are multiples of {steps[-1]}",
        )
    layers = QuantizedLayers(
        tuple(sorted(stored.values())),
        tuple(sorted(set(_without(model, "", stored.keys())))),
        step if form == "int4" else 0,
    )
    for name in (*stored, *stored.values()):
        taken = [pattern for pattern in layers.patterns() if re.match(pattern.removeprefix("re:"), name)]
        assert not taken, f"{taken[0]} names {name}, which is quantized"
    return layers


def _in_layers(name: str, model: nn.Module, decoder: PreTrainedModel) -> bool:
    prefix = next(path for path, module in model.named_modules() if module is decoder.layers)
    return name.startswith(f"{prefix}.") and RECURRENT not in name.split(".")


def _stored_names(model: nn.Module, chosen: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Names of layers with their names in files, of those whose weight is stored by itself and as it is."""
    for together in published_form(model):
        if len(together.weights) == len(together.stored) == 1:
            (name,), (stored,) = together.weights, together.stored
            layer = name.removesuffix(".weight")
            if layer in chosen and stored.endswith(".weight"):
                yield layer, stored.removesuffix(".weight")


def _sides(layer: nn.Linear, form: QuantizedFormat) -> tuple[int, ...]:
    return (layer.in_features,) if form == "int4" else (layer.in_features, layer.out_features)


def _without(module: nn.Module, prefix: str, quantized: Iterable[str]) -> Iterator[str]:
    """Last names of the largest parts with linear layers of which none is quantized."""
    for name, child in module.named_children():
        full = f"{prefix}{name}"
        if not any(isinstance(part, nn.Linear) for part in child.modules()):
            continue
        if any(layer == full or layer.startswith(f"{full}.") for layer in quantized):
            yield from _without(child, f"{full}.", quantized)
        else:
            yield name
