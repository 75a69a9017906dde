"""Reduces a training module to one pipeline stage: some of its language layers, under their original names."""

from __future__ import annotations

import copy
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.sizing.pipeline_partition import Stage


class PackedModel(Protocol):
    """Parts of a training module that stages need."""

    model: nn.Module  # the library's, with its parts below `model.model`

    @property
    def language_part(self) -> str:
        """The language model's name below `model.model`."""
        ...

    def drop_images(self) -> None:
        """Remove tower and projector."""
        ...

    def reduce_to(self, stage: Stage) -> None:
        """Call `reduce_to_stage` where the module can be split."""
        ...


Module = TypeVar("Module", bound=PackedModel)


class Passage(nn.Module):
    """Replaces a layer or norm of another stage: returns hidden states unchanged."""

    def forward(self, hidden: Tensor, **_: object) -> Tensor:
        return hidden


def reduce_to_stage(module: PackedModel, stage: Stage) -> None:
    """Remove everything that is not in `stage`.

    Layers keep their numbers, and so their names in checkpoints. Raises ConfigError for a language model that has no
    `norm`, or changes hidden states outside of it and its layers.
    """
    model = module.model
    language_model = getattr(model.model, module.language_part)
    layers, norm = language_model.layers, getattr(language_model, "norm", None)
    if norm is None:
        raise _unsplit(language_model, "its last norm has another name than `norm`")
    if getattr(model, "lm_head", None) is None:
        raise _unsplit(language_model, "the model's head has another name than `lm_head`")
    is_tied = model.lm_head.weight is language_model.embed_tokens.weight
    language_model.layers, language_model.norm = nn.ModuleList([Passage() for _ in layers]), Passage()
    _require_passage(language_model)
    for number in stage.layers:
        language_model.layers[number] = layers[number]
    if stage.is_last:
        language_model.norm = norm
    else:
        model.lm_head = None
    if not stage.is_first:
        module.drop_images()
        if not (stage.is_last and is_tied):  # a tied head needs the embedding's weight
            language_model.embed_tokens = None


def stage_view(module: Module, stage: Stage) -> Module:
    """A new module that is `stage` alone and shares the weights of `module`."""
    view: Module = _shallow(module)
    part = module.language_part
    view.model = _shallow(module.model)
    view.model.model = _shallow(module.model.model)
    setattr(view.model.model, part, _shallow(getattr(module.model.model, part)))
    view.reduce_to(stage)
    return view


def _shallow(module: nn.Module) -> nn.Module:
    """A copy with the same submodules and parameters, which can be replaced without changing `module`."""
    other = copy.copy(module)
    other._modules, other._parameters = dict(module._modules), dict(module._parameters)
    return other


@torch.no_grad()
def _require_passage(language_model: nn.Module) -> None:
    """Raise ConfigError unless hidden states pass unchanged without layers and norm: each stage runs the whole code."""
    hidden = torch.ones(1, 2, int(language_model.config.hidden_size))
    positions = torch.arange(2)[None]
    passed = language_model(inputs_embeds=hidden, position_ids=positions, use_cache=False).last_hidden_state
    if passed is not hidden or hidden._version:  # not by value: the planner traces fake tensors
        raise _unsplit(language_model, "it changes hidden states outside its layers")


def _unsplit(language_model: nn.Module, why: str) -> ConfigError:
    return ConfigError(
        f"the language model {language_model.config.model_type!r} cannot be split into pipeline stages: {why}",
        fix="use another strategy, such as fsdp",
    )
