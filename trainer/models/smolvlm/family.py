"""The `smolvlm` family: transformers' SmolVLM.

Each image is one tile: the whole of it, resized to the square of `model.image_size`. With `model.longest_edge` it is
cut into several, and one more shows the whole. To all that computes, a tile is an image. The parts have the names that
the other families use: the tower is the vision encoder, and the connector, which puts `scale_factor` x `scale_factor`
patches together to a token, is the projector. Features are what the connector gets: a frozen tower leaves it to
training.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoImageProcessor, PreTrainedConfig, SmolVLMForConditionalGeneration, SmolVLMImageProcessorPil
from transformers.initialization import no_init_weights

from trainer.config.model import ModelConfig
from trainer.errors import ConfigError
from trainer.models.fixed_image_model import SquareFamily, Wiring, square_skeleton, tower_layers_of
from trainer.models.hf_native import build as native
from trainer.models.hf_native.pretrained import load_pretrained
from trainer.models.hf_native.weights import InitialWeights, PretrainedModel
from trainer.models.image_tokens import image_form_of, image_tokens_of
from trainer.models.layers.lora import freeze_and_adapt
from trainer.models.layers.parameter_counts import (
    count_parameters,
    model_shape,
    stack_of,
    vocabulary_of,
)
from trainer.sizing.model_shape import ModelShape

MODEL = PretrainedModel(
    SmolVLMForConditionalGeneration, tower="model.vision_model.", embedding="model.text_model.embed_tokens.weight"
)


def tower_output(config: ModelConfig, tower: nn.Module, pixel_values: Tensor) -> Tensor:
    """What the connector gets: (tiles, 3, side, side) -> (tiles, patches, tower_hidden).

    The library's own modules without its forward pass, which looks in each step whether an image has padding, and with
    that waits for the GPU: a square that is one image has none.
    """
    side = pixel_values.shape[-1] // int(tower.patch_size)
    no_padding = torch.ones(len(pixel_values), side, side, dtype=torch.bool, device=pixel_values.device)
    pixel_values = pixel_values.to(tower.embeddings.patch_embedding.weight.dtype)  # FSDP's bf16 is not that of pixels
    hidden = tower.embeddings(pixel_values=pixel_values, patch_attention_mask=no_padding)
    output: Tensor = tower.post_layernorm(tower.encoder(inputs_embeds=hidden).last_hidden_state)
    return output


WIRING = Wiring("vision_model", "connector", "text_model", tower_output, False)


class SmolVlmFamily(SquareFamily):
    """See `trainer.models.base.Family`."""

    wiring = WIRING

    def image_tokens(self, config: ModelConfig, width: int, height: int) -> int:
        """Language-model tokens of an image of `width` x `height` pixels: as many for each of its tiles."""
        _pretrained_config(config)
        return image_tokens_of(config)(width, height)

    def feature_shape(self, config: ModelConfig) -> tuple[int, int]:
        """Of one tile (patches, tower_hidden)."""
        vision = _pretrained_config(config).vision_config
        return (config.image_size // int(vision.patch_size)) ** 2, int(vision.hidden_size)

    def feature_description(self, config: ModelConfig) -> dict[str, Any]:
        """All that decides what the frozen tower outputs for given image bytes, as plain JSON."""
        return {**native.description(config), "image_size": config.image_size}

    def image_processor(self, config: ModelConfig) -> Any:
        """Resize to the square or cut into tiles, then rescale and normalise. Always by Pillow, as that of `llava`.

        An image that is one tile is not resized before: the step that the published models have there makes tiles of
        equal size, and with one tile it only enlarges small images to reduce them again.
        """
        settings: dict[str, Any] = {
            "do_image_splitting": config.longest_edge is not None,
            "do_resize": config.longest_edge is not None,
            "max_image_size": {"longest_edge": config.image_size},
        }
        if config.longest_edge:
            settings["size"] = {"longest_edge": config.longest_edge}
        if config.tower.weights:
            return load_pretrained(AutoImageProcessor, config.tower, backend="pil", **settings)
        return SmolVLMImageProcessorPil(**settings)

    def build(self, config: ModelConfig, tokenizer: Any) -> nn.Module:
        """The whole model on the CPU in fp32: pretrained where weights are named, else drawn from the seed."""
        _pretrained_config(config)
        model = native.build(config, MODEL, native.config_for(config, tokenizer), len(tokenizer))
        return freeze_and_adapt(model, config, is_whole=True)

    def blueprint(self, config: ModelConfig, tokenizer: Any) -> nn.Module:
        """What `build` makes, without numbers: on the meta device."""
        with torch.device("meta"), no_init_weights():
            return freeze_and_adapt(MODEL.kind(native.config_for(config, tokenizer)).float(), config, is_whole=True)

    def initial_weights(self, config: ModelConfig, tokenizer: Any) -> InitialWeights:
        return native.initial_weights(config, MODEL, len(tokenizer), lambda plain: self.build(plain, tokenizer))

    def skeleton(
        self,
        config: ModelConfig,
        *,
        vocabulary: int,
        language_layers: int | None = None,
        one_inner_tower_layer: bool = False,
    ) -> nn.Module:
        """What `build` makes, but for the numbers in it.

        `one_inner_tower_layer`: the tower's layers between the first and the last are one, which is quicker to make.
        """
        model = square_skeleton(
            MODEL.kind, _pretrained_config(config), WIRING, vocabulary, language_layers, one_inner_tower_layer
        )
        return freeze_and_adapt(model, config, is_whole=language_layers is None and not one_inner_tower_layer)

    def shape(self, config: ModelConfig) -> ModelShape:
        """Sizes, with the parameters counted on the meta device. Its images are tiles."""
        whole = _pretrained_config(config)
        vision, text = whole.vision_config, whole.text_config
        with torch.device("meta"):
            model = self.skeleton(config, vocabulary=vocabulary_of(config, text))
        tower = model.model.vision_model
        patches, width = self.feature_shape(config)
        return model_shape(
            config,
            model,
            tower_layers_of(tower),
            tower_parameters=count_parameters(tower),
            projector_parameters=count_parameters(model.model.connector),
            tower=stack_of(vision, tower_layers_of(tower)[0]),
            tower_tokens=patches,
            image_tokens=patches // int(whole.scale_factor) ** 2,
            most_tiles=image_form_of(config).most_tiles,
            feature_width=width * int(whole.scale_factor) ** 2,
            patch_pixels=int(vision.num_channels) * int(vision.patch_size) ** 2,
            projector_layers=1,
        )

    def build_tower(self, config: ModelConfig) -> nn.Module:
        """The tower alone, on the CPU in fp32 and in evaluation mode. Random weights depend on the seed only."""
        return native.build_vision(config, MODEL).eval()

    def save_settings(self, config: ModelConfig, model: nn.Module, tokenizer: Any, folder: Path) -> None:
        """Write all that plain `from_pretrained` needs but the weights: configuration, tokenizer and processor."""
        native.save_settings(model, tokenizer, self.image_processor(config), folder)

    def load(self, folder: Path) -> nn.Module:
        """An exported model."""
        return SmolVLMForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)


def _pretrained_config(config: ModelConfig) -> PreTrainedConfig:
    """The model's configuration. Raises ConfigError for one of another family, or that images do not fit."""
    whole = native.pretrained_config(config)
    vision, side = whole.vision_config, config.image_size
    token_side = int(vision.patch_size) * int(whole.scale_factor)
    if side % token_side or side > int(vision.image_size):
        raise ConfigError(
            f"model.image_size {side} is no size of images for this model",
            expected=f"a multiple of {token_side} (patch_size x scale_factor), at most {vision.image_size}",
        )
    return whole
