"""Initial weights of a LLaVA: each part from its own source, one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, LlavaConfig, LlavaForConditionalGeneration, PreTrainedConfig
from transformers.initialization import no_init_weights
from transformers.models.llava.modeling_llava import LlavaMultiModalProjector

from vlmpipe.trainer.config.weights.origin import WeightsConfig
from vlmpipe.trainer.models.base import Weights
from vlmpipe.trainer.models.hf_native.weights import HEAD, PretrainedModel, StoredWeights

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


def stored_language(part: WeightsConfig, whole: LlavaConfig, rows: int) -> StoredWeights:
    stored = StoredWeights(part, CAUSAL_LM, rows, is_tied=bool(whole.tie_word_embeddings))
    with torch.device("meta"), no_init_weights():
        language = AutoModelForCausalLM.from_config(whole.text_config, trust_remote_code=False)
    stored.require("language model", _shapes(language))
    return stored


def _shapes(module: nn.Module) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in module.state_dict().items()}


@dataclass(frozen=True)
class Part:
    """A part of a model. prefix: of its names in the source, in place of that in the model."""

    make: Callable[[], Weights]
    prefix: str = ""

    @cached_property
    def source(self) -> Weights:
        return self.make()


class PartWeights:
    """See `vlmpipe.trainer.models.base.Weights`. Each part has a source of its own, by the prefix of its names.

    A source is made when the first weight of its part is read: an export of trained weights needs none. Raises
    ConfigError then if a stored part lacks a weight.
    """

    def __init__(self, parts: Mapping[str, Part], rest: Part) -> None:
        self._parts, self._rest = parts, rest

    def read(self, name: str) -> Tensor:
        prefix, part = next((item for item in self._parts.items() if name.startswith(item[0])), ("", self._rest))
        return part.source.read(part.prefix + name.removeprefix(prefix))


def drawn_projector(whole: LlavaConfig, seed: int) -> nn.Module:
    """Draw a projector from transformers' distribution of initial weights."""
    with torch.device("meta"), no_init_weights():
        model = LlavaForConditionalGeneration(whole)
    torch.manual_seed(seed)
    projector = LlavaMultiModalProjector(whole).float()
    projector.apply(model._init_weights)
    return projector
