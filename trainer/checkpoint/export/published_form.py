"""The form in which published models of a type store their weights: names, shapes and order of tensors in files.

transformers keeps names of its own and converts published files when it loads them. It converts back when it saves, but
drops every change of a prefix for a model that was built from a configuration, and a few of its rules cannot be turned
round. Other programs know the published names only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, apply_converters, revert_weight_conversion

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

Tensors = dict[str, Tensor]

# Rules of transformers that rename too much or too little backwards: type -> pattern and text of names that come out.
CORRECTIONS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "kimi_k25": (
        (r"^model\.mm_projector\.", "mm_projector."),
        (r"^language_model\.model\.blocks\.", "language_model.model.layers."),
        (r"^vision_tower\.encoder\.patch_embed\.", "vision_tower.patch_embed."),
    ),
    "qianfan_ocr": ((r"^language_model\.model\.encoder\.layers\.", "language_model.model.layers."),),
}
# Experts of (experts, in, out) in files, (experts, out, in) here: transformers transposes them only when it loads.
TRANSPOSED = {"qwen3_vl_moe": r"\.mlp\.experts\.(gate_up|down)_proj$"}
# Two tensors that the same rows are stored in -> the field of `text_config` with the rows of the first.
UNEVEN_ROWS = {(".wte.embedding", ".wte.new_embedding"): "vocab_size"}


@dataclass(frozen=True)
class StoredTensors:
    """Weights of a model (`weights`, by their names in the state dict) that are stored together, as `stored`: name in
    the file -> tensor on the meta device. Mostly one weight as one tensor."""

    weights: tuple[str, ...]
    stored: Tensors
    convert: Callable[[Tensors], Tensors]


def published_form(model: nn.Module) -> list[StoredTensors]:
    """How each weight is stored, but for tied copies, in the order in which they are complete when they come by name.

    model: of transformers, without adapters; may be on the meta device. A model of another library is stored as it is.
    """
    state = {
        name: torch.empty_like(tensor, device="meta")
        for name, tensor in sorted(model.state_dict().items())
        if name not in model.all_tied_weights_keys
    }
    form = _Form(model)
    whole = form.stored(state)
    names = {id(tensor): name for name, tensor in state.items()}
    renamed = {names[id(tensor)]: stored for stored, tensor in whole.items() if id(tensor) in names}
    together: dict[str, list[str]] = {}
    for name in state:
        together.setdefault(name if name in renamed else form.group_of(name), []).append(name)
    tensors = [
        _renamed(group[0], renamed[group[0]], state[group[0]])
        if group[0] in renamed
        else StoredTensors(tuple(group), form.stored({name: state[name] for name in group}), form.stored)
        for group in together.values()
    ]
    assert stored_tensors(tensors).keys() == whole.keys(), "weights are stored the same with and without the others"
    return sorted(tensors, key=lambda tensor: tensor.weights[-1])


def stored_tensors(form: Iterable[StoredTensors]) -> dict[str, Tensor]:
    """Name in the file -> tensor on the meta device, in the order in which they are written."""
    return {name: tensor for together in form for name, tensor in together.stored.items()}


class _Form:
    """transformers' own rules, backwards, with all changes of prefixes."""

    def __init__(self, model: nn.Module) -> None:
        self._model: PreTrainedModel = model
        self._rules = get_model_conversion_mapping(self._model, add_legacy=False)
        backwards = [rule.reverse_transform() for rule in reversed(self._rules)]
        self._converters = [rule for rule in backwards if isinstance(rule, WeightConverter)]

    def group_of(self, name: str) -> str:
        """Return a name that weights stored together have in common."""
        return str(apply_converters(name, self._converters)[0])

    def stored(self, weights: Tensors) -> Tensors:
        before = self._model.__dict__.get("_weight_conversions")
        self._model.__dict__["_weight_conversions"] = self._rules or None  # as after loading a published model
        try:
            reverted = revert_weight_conversion(self._model, dict(weights))
        finally:
            self._model.__dict__["_weight_conversions"] = before
        corrected = dict(self._corrected(name, tensor) for name, tensor in reverted.items())
        return _with_uneven_rows(corrected, self._model.config)

    def _corrected(self, name: str, tensor: Tensor) -> tuple[str, Tensor]:
        model_type = self._model.config.model_type
        for pattern, text in CORRECTIONS.get(model_type, ()):
            name = re.sub(pattern, text, name)
        if model_type in TRANSPOSED and re.search(TRANSPOSED[model_type], name):
            _, rows, columns = tensor.shape
            # A square matrix is left: transformers would read it as it is.
            tensor = tensor if rows == columns else tensor.transpose(1, 2).contiguous()
        return name, tensor


def _renamed(name: str, stored: str, tensor: Tensor) -> StoredTensors:
    return StoredTensors((name,), {stored: tensor}, lambda weights: {stored: weights[name]})


def _with_uneven_rows(tensors: Tensors, config: PreTrainedConfig) -> Tensors:
    """transformers cuts rows that it joined into equal parts, whatever they were."""
    for (ending, other_ending), field in UNEVEN_ROWS.items():
        for first in [name for name in tensors if name.endswith(ending)]:
            second = first.removesuffix(ending) + other_ending
            whole, rows = torch.cat([tensors[first], tensors[second]]), int(getattr(config.text_config, field))
            tensors |= {first: whole[:rows], second: whole[rows:]}
    return tensors
