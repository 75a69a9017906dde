"""Training module and shared family methods for models whose images, or tiles of images, all have one size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Unpack

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.models.base import ShardingUnits
from vlmpipe.trainer.models.hf_native.family import TransformersFamily
from vlmpipe.trainer.models.image_inputs import Grid
from vlmpipe.trainer.models.layers.freeze import tower_layers_of, trains
from vlmpipe.trainer.models.layers.image_placeholders import embedded
from vlmpipe.trainer.models.layers.parameter_counts import OfImages, count_parameters, model_shape
from vlmpipe.trainer.models.packed_vlm import PackedVLM
from vlmpipe.trainer.sizing.model_shape import ModelShape

IMAGE_CHANNELS = 3


@dataclass(frozen=True)
class Wiring:
    """transformers' names for the parts of a family's model below `model.model`, and how its tower runs."""

    tower: str
    projector: str
    language_model: str
    tower_output: Callable[[ModelConfig, nn.Module, Tensor], Tensor]  # pixel values -> input of the projector
    calls_tower: bool  # `tower_output` runs the tower's own forward pass, not its modules one by one


class FixedImageVLM(PackedVLM):
    def __init__(self, config: ModelConfig, model: nn.Module, wiring: Wiring, *, cached: bool) -> None:
        super().__init__(config, model, wiring.language_model)
        self.wiring = wiring
        self.tower_is_frozen = not trains(self.tower)
        if cached:
            setattr(model.model, wiring.tower, None)  # its output is read from disk
        elif self.tower and self.tower_is_frozen:
            self.tower.eval()

    @property
    def tower(self) -> nn.Module | None:
        """The vision encoder; None with cached features, and in a pipeline stage without it."""
        return getattr(self.model.model, self.wiring.tower)

    @property
    def projector(self) -> nn.Module | None:
        """The projector; None in a pipeline stage without it."""
        return getattr(self.model.model, self.wiring.projector)

    def drop_images(self) -> None:
        """See `vlmpipe.trainer.models.layers.pipeline_stage.PackedModel`."""
        for part in (self.wiring.tower, self.wiring.projector):
            setattr(self.model.model, part, None)

    def run_tower(self, images: Tensor, _grids: Sequence[Grid] | None) -> Tensor:
        num_images = len(images)
        if not num_images:
            # Encode one blank image and drop its features: towers cannot reshape an empty batch, and a trained tower
            # must take part in its collectives on every rank.
            images = images.new_zeros(1, *images.shape[1:])
        return self.wiring.tower_output(self.config, self.tower, images)[:num_images]

    def project(self, features: Tensor) -> Tensor:
        return project(self.projector, features)

    def embed(self, input_ids: Tensor, projected: Tensor) -> tuple[Tensor, dict[str, object]]:
        return embedded(self.model, input_ids, projected), {}


class SquareFamily(TransformersFamily):
    """The shared half of families whose images, or tiles of images, are squares of one size. See `Family`."""

    wiring: ClassVar[Wiring]

    @torch.no_grad()
    def encode(
        self,
        config: ModelConfig,
        tower: nn.Module,
        pixel_values: Tensor,
        grids: Sequence[Grid] | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> Tensor:
        """Features of images: (images, 3, side, side) -> (images, tokens, tower_hidden) in `dtype`.

        bf16 is what the cache stores; training without a cache rounds the same way where the tower is frozen.
        """
        return self.wiring.tower_output(config, tower, pixel_values).to(dtype)

    def tower(self, model: nn.Module) -> nn.Module:
        return getattr(model.model, self.wiring.tower)

    def project(self, model: nn.Module, features: Tensor) -> Tensor:
        """(images, feature tokens, tower_hidden) -> (images, tokens, hidden)."""
        return project(getattr(model.model, self.wiring.projector), features)

    def generation_inputs(
        self,
        model: nn.Module,
        input_ids: Tensor,
        projected: Tensor,
        grids: Tensor | None = None,
    ) -> dict[str, object]:
        """The tokens' embeddings, with projected features in place of the image tokens'."""
        return {"inputs_embeds": embedded(model, input_ids, projected)}

    def training_module(self, config: ModelConfig, model: nn.Module, *, cached: bool) -> nn.Module:
        return FixedImageVLM(config, model, self.wiring, cached=cached)

    def blocks(self, module: FixedImageVLM) -> ShardingUnits:
        return module.sharding_units(tower_layers_of(module.tower) if module.tower is not None else [])

    def square_shape(
        self,
        config: ModelConfig,
        model: nn.Module,
        vision: PreTrainedConfig,
        *,
        features: tuple[int, int],
        **of_images: Unpack[OfImages],
    ) -> ModelShape:
        """Sizes of a model on the meta device. of_images: fields of `ModelShape` that depend on how it takes images.

        Raises ConfigError where the tower gives other features than `features`, (tokens, width) of an image.
        """
        self._require_features(config, self.tower(model), features)
        return model_shape(
            config,
            model,
            tower_layers_of(self.tower(model)),
            vision,
            tower_parameters=count_parameters(self.tower(model)),
            projector_parameters=count_parameters(getattr(model.model, self.wiring.projector)),
            **of_images,
        )

    def _require_features(self, config: ModelConfig, tower: nn.Module, expected: tuple[int, int]) -> None:
        """Let the tower look at an image that has a shape only."""
        image = torch.empty(1, IMAGE_CHANNELS, config.image_size, config.image_size, device="meta")
        found = tuple(self.wiring.tower_output(config, tower, image).shape[1:])
        if found != expected:
            raise ConfigError(
                f"the tower gives {found[0]} tokens of width {found[1]} for an image of {config.image_size} pixels",
                expected=f"{expected[0]} of width {expected[1]}, one for each patch and one more only for the class "
                "token of CLIP and DINOv2",
                fix="use another tower, or set model.feature_select to drop_cls for a tower with a class token and to "
                "full for others",
            )


def project(projector: nn.Module, features: Tensor) -> Tensor:
    projected: Tensor = projector(features.to(next(projector.parameters()).dtype))
    return projected
