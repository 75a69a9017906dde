"""Training module of the `llava` family, whose images are squares of one size."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.models.image_inputs import Grid
from vlmpipe.trainer.models.layers.freeze import trains
from vlmpipe.trainer.models.layers.image_placeholders import embedded
from vlmpipe.trainer.models.packed_vlm import PackedVLM


class LlavaVLM(PackedVLM):
    def __init__(self, config: ModelConfig, model: nn.Module, *, cached: bool) -> None:
        super().__init__(config, model)
        self.tower_is_frozen = not trains(self.tower)
        if cached:
            model.model.vision_tower = None  # its output is read from disk
        elif self.tower and self.tower_is_frozen:
            self.tower.eval()

    @property
    def tower(self) -> nn.Module | None:
        """The vision encoder; None with cached features, and in a pipeline stage without it."""
        return self.model.model.vision_tower

    @property
    def projector(self) -> nn.Module | None:
        """The projector; None in a pipeline stage without it."""
        return self.model.model.multi_modal_projector

    def drop_images(self) -> None:
        self.model.model.vision_tower = self.model.model.multi_modal_projector = None

    def run_tower(self, images: Tensor, _grids: Sequence[Grid] | None) -> Tensor:
        num_images = len(images)
        if not num_images:
            # Encode one blank image and drop its features: towers cannot reshape an empty batch, and a trained tower
            # must take part in its collectives on every rank.
            images = images.new_zeros(1, *images.shape[1:])
        return tower_output(self.config, self.tower, images)[:num_images]

    def project(self, features: Tensor) -> Tensor:
        return project(self.projector, features)

    def embed(self, input_ids: Tensor, projected: Tensor) -> tuple[Tensor, dict[str, object]]:
        return embedded(self.model, input_ids, projected), {}


def tower_output(config: ModelConfig, tower: nn.Module, pixel_values: Tensor) -> Tensor:
    """Hidden states that feed the projector: (images, 3, side, side) -> (images, tokens, tower_hidden)."""
    hidden = tower(pixel_values, output_hidden_states=True).hidden_states[config.feature_layer]
    return hidden[:, 1:] if config.feature_select == "drop_cls" else hidden


def project(projector: nn.Module, features: Tensor) -> Tensor:
    projected: Tensor = projector(features.to(next(projector.parameters()).dtype))
    return projected
