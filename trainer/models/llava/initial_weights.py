"""Initial weights of a LLaVA: each part from its own source, one tensor at a time."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
)
from transformers.initialization import no_init_weights
from transformers.models.llava.modeling_llava import LlavaMultiModalProjector

from vlmpipe.trainer.config.model import ModelConfig, WeightsConfig
from vlmpipe.trainer.models.base import Weights
from vlmpipe.trainer.models.hf_native.weights import HEAD, DrawnWeights, PretrainedModel, StoredWeights
from vlmpipe.trainer.models.llava.configuration import vision_config

# Prefixes of weights in the whole model.
TOWER, PROJECTOR, LANGUAGE_MODEL = "model.vision_tower.", "model.multi_modal_projector.", "model.language_model."
# A part is stored by itself, or in a whole LLaVA under the names of today, of its first release or of our exports.
TOWERS = PretrainedModel(
    AutoModel,
    stored_as={
        "": ["vision_model.", "vision_tower.vision_model.", "vision_tower.", f"{TOWER}vision_model.", TOWER],
    },
)
PROJECTORS = PretrainedModel(None, stored_as={"": ["multi_modal_projector.", PROJECTOR]})
CAUSAL_LM = PretrainedModel(
    AutoModelForCausalLM,
    embedding="model.embed_tokens.weight",
    stored_as={"model.": ["language_model.model.", LANGUAGE_MODEL], HEAD: [f"language_model.{HEAD}"]},
)


def stored_tower(part: WeightsConfig, vision: PreTrainedConfig) -> StoredWeights:
    with torch.device("meta"):
        tower = AutoModel.from_config(vision, trust_remote_code=False)
    kind = type(tower)
    stored = StoredWeights(part, replace(TOWERS, kind=kind), config=vision)
    stored.require("tower", _shapes(tower))
    return stored


def stored_projector(part: WeightsConfig, whole: LlavaConfig) -> StoredWeights:
    stored = StoredWeights(part, PROJECTORS)
    with torch.device("meta"):
        stored.require("projector", _shapes(LlavaMultiModalProjector(whole)))
    return stored


def _shapes(module: nn.Module) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in module.state_dict().items()}


class Builder(Protocol):
    """Functions of a family that loading needs."""

    def config_for(self, config: ModelConfig, tokenizer: PreTrainedTokenizerFast) -> LlavaConfig: ...
    def build(self, config: ModelConfig, tokenizer: PreTrainedTokenizerFast) -> nn.Module: ...
    def build_tower(self, config: ModelConfig) -> nn.Module: ...


class InitialWeights:
    """See `vlmpipe.trainer.models.base.Weights`. Equal to those of `build`.

    Stored parts are read tensor by tensor, and a projector or tower that is not stored is drawn by itself. Without a
    stored language model the model is built once and held: each drawn weight depends on all drawn before it.

    Files are looked at when the first weight of their part is read: an export of trained weights needs none. Raises
    ConfigError then if a stored part lacks a weight.
    """

    def __init__(self, family: Builder, config: ModelConfig, tokenizer: PreTrainedTokenizerFast) -> None:
        self._family, self._config, self._tokenizer = family, config, tokenizer

    def read(self, name: str) -> Tensor:
        if name.startswith(TOWER):
            return self._tower.read(name.removeprefix(TOWER))
        if not self._config.language_model.weights:
            return self._drawn.read(name)
        if name.startswith(PROJECTOR):
            return self._projector.read(name.removeprefix(PROJECTOR))
        return self._language.read(name.replace(LANGUAGE_MODEL, "model.", 1))

    @cached_property
    def _tower(self) -> Weights:
        if self._config.tower.weights:
            return stored_tower(self._config.tower, vision_config(self._config))
        return DrawnWeights(lambda: self._family.build_tower(self._config).state_dict())

    @cached_property
    def _drawn(self) -> Weights:
        return DrawnWeights(lambda: self._family.build(self._config, self._tokenizer).state_dict())

    @cached_property
    def _projector(self) -> Weights:
        whole = self._family.config_for(self._config, self._tokenizer)
        if self._config.projector:
            return stored_projector(self._config.projector, whole)
        return DrawnWeights(lambda: _drawn_projector(whole, self._config.seed).state_dict())

    @cached_property
    def _language(self) -> Weights:
        whole, rows = self._family.config_for(self._config, self._tokenizer), len(self._tokenizer)
        tied = bool(whole.tie_word_embeddings)
        stored = StoredWeights(self._config.language_model, CAUSAL_LM, rows, is_tied=tied)
        with torch.device("meta"), no_init_weights():
            language = AutoModelForCausalLM.from_config(whole.text_config, trust_remote_code=False)
        stored.require("language model", _shapes(language))
        return stored


def _drawn_projector(whole: LlavaConfig, seed: int) -> nn.Module:
    """Draw a projector from transformers' distribution of initial weights."""
    with torch.device("meta"), no_init_weights():
        model = LlavaForConditionalGeneration(whole)
    torch.manual_seed(seed)
    projector = LlavaMultiModalProjector(whole).float()
    projector.apply(model._init_weights)
    return projector
