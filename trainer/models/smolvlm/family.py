"""The `smolvlm` family: transformers' SmolVLM.

Each image is one tile: the whole image, resized to the square of `model.image_size`. With `model.longest_edge` it is
cut into several, plus one tile of the whole. Downstream code treats each tile as an image. The tower is the vision
encoder; the connector, which joins `scale_factor` x `scale_factor` patches to a token, is the projector. Features are
the connector's input, so that a frozen tower leaves the connector to training.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import (
    AutoImageProcessor,
    BaseImageProcessor,
    PreTrainedConfig,
    SmolVLMForConditionalGeneration,
    SmolVLMImageProcessorPil,
)
from transformers.utils import PROCESSOR_NAME

from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.models.fixed_image_model import SquareFamily, Wiring
from vlmpipe.trainer.models.hf_native.family import NativeFamily
from vlmpipe.trainer.models.hf_native.pretrained import load_pretrained, weights_description
from vlmpipe.trainer.models.hf_native.weights import PretrainedModel
from vlmpipe.trainer.models.image_tokens import image_form_of
from vlmpipe.trainer.models.layers.parameter_counts import vocabulary_of
from vlmpipe.trainer.sizing.model_shape import ModelShape


def tower_output(config: ModelConfig, tower: nn.Module, pixel_values: Tensor) -> Tensor:
    """The connector's input: (tiles, 3, side, side) -> (tiles, patches, tower_hidden).

    Runs the library's modules without its forward pass, which checks each image for padding in every step and so waits
    for the GPU. Squares have no padding.
    """
    side = pixel_values.shape[-1] // int(tower.patch_size)
    no_padding = torch.ones(len(pixel_values), side, side, dtype=torch.bool, device=pixel_values.device)
    pixel_values = pixel_values.to(tower.embeddings.patch_embedding.weight.dtype)  # FSDP's bf16 is not that of pixels
    hidden = tower.embeddings(pixel_values=pixel_values, patch_attention_mask=no_padding)
    output: Tensor = tower.post_layernorm(tower.encoder(inputs_embeds=hidden).last_hidden_state)
    return output


class SmolVlmFamily(SquareFamily, NativeFamily):
    """See `vlmpipe.trainer.models.base.Family`."""

    wiring = Wiring("vision_model", "connector", "text_model", tower_output, calls_tower=False)
    models = {  # noqa: RUF012
        "smolvlm": PretrainedModel(
            SmolVLMForConditionalGeneration, "model.text_model.embed_tokens.weight", tower="model.vision_model."
        )
    }

    def whole_config(self, config: ModelConfig) -> PreTrainedConfig:
        """Raises ConfigError for another family's configuration, or an image size that does not fit this one."""
        whole = super().whole_config(config)
        vision, side = whole.vision_config, config.image_size
        token_side = int(vision.patch_size) * int(whole.scale_factor)
        if side % token_side or side > int(vision.image_size):
            raise ConfigError(
                f"model.image_size {side} is no size of images for this model",
                expected=f"a multiple of {token_side} (patch_size x scale_factor), at most {vision.image_size}",
            )
        return whole

    def feature_shape(self, config: ModelConfig) -> tuple[int, int]:
        """(patches, tower_hidden) of one tile."""
        vision = self.whole_config(config).vision_config
        return (config.image_size // int(vision.patch_size)) ** 2, int(vision.hidden_size)

    def feature_description(self, config: ModelConfig) -> dict[str, object]:
        """Everything that determines the frozen tower's output for given image bytes, as plain JSON."""
        return {**weights_description(config), "image_size": config.image_size}

    def image_processor(self, config: ModelConfig) -> BaseImageProcessor:
        """Resize to the square or cut into tiles, then rescale and normalise. Always by Pillow, as that of `llava`.

        Images of one tile skip the published models' first resizing: it prepares cutting, and would only enlarge small
        images and reduce them again.
        """
        settings: dict[str, object] = {
            "do_image_splitting": config.longest_edge is not None,
            "do_resize": config.longest_edge is not None,
            "max_image_size": {"longest_edge": config.image_size},
        }
        if config.longest_edge:
            settings["size"] = {"longest_edge": config.longest_edge}
        if config.tower.weights:
            return load_pretrained(AutoImageProcessor, config.tower, backend="pil", **settings)
        return SmolVLMImageProcessorPil(**settings)

    def shape(self, config: ModelConfig) -> ModelShape:
        """Sizes, with the parameters counted on the meta device. Its images are tiles."""
        whole = self.whole_config(config)
        vision, scale = whole.vision_config, int(whole.scale_factor)
        with torch.device("meta"):
            model = self.skeleton(config, vocabulary=vocabulary_of(config, whole.text_config))
        patches, width = self.feature_shape(config)
        return self.square_shape(
            config,
            model,
            vision,
            features=(patches, width),
            tower_tokens=patches,
            image_tokens=patches // scale**2,
            max_tiles=image_form_of(config).max_tiles,
            feature_width=width * scale**2,
            patch_pixels=int(vision.num_channels) * int(vision.patch_size) ** 2,
            projector_layers=1,
        )

    def save_settings(self, config: ModelConfig, model: nn.Module, tokenizer: object, folder: Path) -> None:
        super().save_settings(config, model, tokenizer, folder)
        side = config.image_size // int(model.config.vision_config.patch_size) // int(model.config.scale_factor)
        settings = {"processor_class": "SmolVLMProcessor", "image_seq_len": side**2}
        (folder / PROCESSOR_NAME).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")

    def build_tower(self, config: ModelConfig) -> nn.Module:
        return self.build_vision(config)
