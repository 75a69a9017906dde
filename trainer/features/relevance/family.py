"""ARR-COC over models whose images are grids of patches: `model.relevance` chooses visual tokens for their texts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vlmpipe.trainer.config.arr_coc.channels import CHANNELS
from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.features.relevance.generation import selected_inputs
from vlmpipe.trainer.features.relevance.model import RelevanceVLM, TracedVLM, with_textures
from vlmpipe.trainer.features.relevance.module import FILE, PREFIX, RelevanceModule, load_relevance
from vlmpipe.trainer.features.relevance.textures import TEXTURES_VERSION
from vlmpipe.trainer.models.base import Weights
from vlmpipe.trainer.models.hf.family import HfFamily
from vlmpipe.trainer.models.hf.processor import Tensors
from vlmpipe.trainer.models.hf_native.pretrained import pretrained_config
from vlmpipe.trainer.models.image_inputs import Grid
from vlmpipe.trainer.models.layers.parameter_counts import count_parameters
from vlmpipe.trainer.models.layers.selection_inputs import marks_of
from vlmpipe.trainer.sizing.model_shape import ModelShape
from vlmpipe.trainer.storage.model_folders import local_folder

if TYPE_CHECKING:
    from transformers import BaseImageProcessor


class ArrCocFamily(HfFamily):
    """A model with a `RelevanceModule` as its part `relevance`. See `vlmpipe.trainer.models.base.Family`.

    Features end with the image's textures, so that these are computed once an image too.
    """

    _processor: BaseImageProcessor | None = None

    def feature_shape(self, config: ModelConfig) -> tuple[int]:
        return (super().feature_shape(config)[0] + len(CHANNELS),)

    def feature_description(self, config: ModelConfig) -> dict[str, object]:
        return {**super().feature_description(config), "textures": {"version": TEXTURES_VERSION, "channels": CHANNELS}}

    def build(self, config: ModelConfig, tokenizer: object) -> nn.Module:
        model = super().build(config, tokenizer)
        model.relevance = relevance_of(config, tokenizer)
        return model

    def blueprint(self, config: ModelConfig, tokenizer: object, *, buffers: bool = False) -> nn.Module:
        model = super().blueprint(config, tokenizer, buffers=buffers)
        model.relevance = relevance_of(config, tokenizer)
        return model

    def skeleton(self, config: ModelConfig, **sizes: Any) -> nn.Module:
        assert config.relevance is not None
        model = super().skeleton(config, **sizes)
        width = int(model.config.text_config.hidden_size)
        model.relevance = RelevanceModule(config.relevance, width, ()).requires_grad_(config.relevance.learns)
        model.is_skeleton = True
        return model

    def shape(self, config: ModelConfig) -> ModelShape:
        """Return the base model's shape with at most the selected tokens per image.

        The relevance module's parameters are counted among the adapters.
        """
        assert config.relevance is not None
        shape = super().shape(config)
        width = shape.language.hidden
        with torch.device("meta"):
            count = count_parameters(RelevanceModule(config.relevance, width, ())) if config.relevance.learns else 0
        parameters = {**shape.parameters, "adapters": shape.parameters["adapters"] + count}
        num_kept = config.relevance.kept_of(shape.image_tokens)
        selections = config.relevance.samples if config.relevance.learns else 1
        return dataclasses.replace(shape, parameters=parameters, image_tokens=num_kept, selections=selections)

    def initial_weights(self, config: ModelConfig, tokenizer: object) -> Weights:  # type: ignore[override]
        base = super().initial_weights(config, tokenizer)
        return WithRelevance(base, relevance_of(config, tokenizer).state_dict())

    def load(self, folder: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
        """An exported model with its relevance module."""
        model = super().load(folder, dtype)
        model.relevance = load_relevance(folder / FILE)
        for parameter in model.relevance.parameters():
            parameter.data = parameter.data.to(dtype)
        return model

    @torch.no_grad()
    def encode(
        self,
        config: ModelConfig,
        tower: nn.Module,
        pixel_values: Tensors | Tensor,
        grids: Sequence[Grid] | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> list[Tensor]:
        assert grids is not None and isinstance(pixel_values, Tensor)
        features = torch.cat(super().encode(config, tower, pixel_values, grids, dtype))
        merge = int(tower.config.spatial_merge_size) ** 2
        textured = with_textures(features, pixel_values, grids, self.processor(config))
        return list(textured.split([rows * columns // merge for _, rows, columns in grids]))

    def project(self, model: nn.Module, features: Tensor) -> Tensor:
        """(tokens, levels x hidden + channels): textures stay after the projected features."""
        count = len(CHANNELS)
        return torch.cat([super().project(model, features[:, :-count]), features[:, -count:].float()], dim=1)

    def generation_inputs(
        self,
        model: nn.Module,
        input_ids: Tensor,
        projected: Tensor,
        grids: Tensor | None = None,
    ) -> dict[str, object]:
        """Prompts without the tokens that are not kept, and all arguments that follow from their number."""
        return selected_inputs(model, input_ids, projected, grids)

    def training_module(self, config: ModelConfig, model: nn.Module, *, cached: bool) -> nn.Module:
        if hasattr(model, "is_skeleton"):
            return TracedVLM(config, model, None, cached=cached)
        return RelevanceVLM(config, model, self.processor(config), cached=cached)

    def processor(self, config: ModelConfig) -> BaseImageProcessor:
        """The image processor, made once: see `with_textures`."""
        if self._processor is None:
            self._processor = self.image_processor(config)
        return self._processor


class WithRelevance:
    """A base's weights and those of a relevance module. A `vlmpipe.trainer.models.base.Weights`."""

    def __init__(self, base: Weights, relevance: dict[str, Tensor]) -> None:
        self._base, self._relevance = base, relevance

    def read(self, name: str) -> Tensor:
        if name.startswith(PREFIX):
            return self._relevance[name.removeprefix(PREFIX)]
        return self._base.read(name)


def relevance_of(config: ModelConfig, tokenizer: object) -> RelevanceModule:
    """The module that training starts from, on the CPU: that of the export that model.pretrained names, if it has the
    same parameters, else drawn from the seed."""
    assert config.relevance is not None
    width = int(pretrained_config(config).text_config.hidden_size)
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        module = RelevanceModule(config.relevance, width, marks_of(tokenizer)).float()
    part = config.tower
    folder = local_folder(part.weights, part.revision, weights=False, also=FILE) if part.weights else None
    if folder and (folder / FILE).is_file():
        stored = load_relevance(folder / FILE).state_dict()
        shapes = {name: tensor.shape for name, tensor in module.state_dict().items()}
        if shapes == {name: tensor.shape for name, tensor in stored.items()}:
            module.load_state_dict(stored)
    return module.requires_grad_(config.relevance.learns)
