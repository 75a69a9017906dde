"""The families `qwen2_5_vl` and `qwen3_vl`: native vision-language models of transformers.

Images keep their aspect ratio, so they differ in tokens. The tower is the vision encoder without its merger. The
merger, which joins `merge` x `merge` patches to a token, is the projector. Features are its input, so that a frozen
tower leaves it to training.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import (
    AutoImageProcessor,
    BaseImageProcessor,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
    Qwen3VLForConditionalGeneration,
)

from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.models.base import ShardingUnits
from vlmpipe.trainer.models.hf.encoder import mergers_of
from vlmpipe.trainer.models.hf_native.family import NativeFamily
from vlmpipe.trainer.models.hf_native.pretrained import load_pretrained, pretrained_config, weights_description
from vlmpipe.trainer.models.hf_native.weights import PretrainedModel
from vlmpipe.trainer.models.image_inputs import Grid
from vlmpipe.trainer.models.image_tokens import VIDEO_TOKEN, VISION_END, VISION_START, image_form_of
from vlmpipe.trainer.models.layers.freeze import tower_layers_of
from vlmpipe.trainer.models.layers.parameter_counts import count_parameters, model_shape, vocabulary_of
from vlmpipe.trainer.models.qwen_vl.model import (
    QwenVLM,
    encoder_output,
    project,
    tower_output,
    without_mergers,
)
from vlmpipe.trainer.models.qwen_vl.vision_metadata import sizes_of
from vlmpipe.trainer.sizing.model_shape import ModelShape, Windows

VISUAL, LANGUAGE_MODEL = "model.visual.", "model.language_model."
NO_TOKEN = -1  # no token has this id
KINDS = {"qwen2_5_vl": Qwen2_5_VLForConditionalGeneration, "qwen3_vl": Qwen3VLForConditionalGeneration}


class QwenVlFamily(NativeFamily):
    """See `vlmpipe.trainer.models.base.Family`."""

    models = {  # noqa: RUF012
        name: PretrainedModel(
            kind,
            f"{LANGUAGE_MODEL}embed_tokens.weight",
            tower=VISUAL,
            stored_as={VISUAL: ["visual."], LANGUAGE_MODEL: ["model."]},  # in the first releases on the hub
        )
        for name, kind in KINDS.items()
    }

    def config_for(self, config: ModelConfig, tokenizer: PreTrainedTokenizerFast) -> PreTrainedConfig:
        whole = super().config_for(config, tokenizer)
        whole.vision_start_token_id = tokenizer.convert_tokens_to_ids(VISION_START)
        whole.vision_end_token_id = tokenizer.convert_tokens_to_ids(VISION_END)
        video_token_id = tokenizer.backend_tokenizer.token_to_id(VIDEO_TOKEN)
        if video_token_id is not None:
            whole.video_token_id = video_token_id
        elif whole.video_token_id < len(tokenizer):
            whole.video_token_id = NO_TOKEN  # the default is some other token of this tokenizer
        return whole

    def feature_shape(self, config: ModelConfig) -> tuple[int]:
        """(numbers,) of a token: of all its patches, at each level that reaches the language model."""
        vision = pretrained_config(config).vision_config
        levels = 1 + len(getattr(vision, "deepstack_visual_indexes", ()))
        return (int(vision.hidden_size) * int(vision.spatial_merge_size) ** 2 * levels,)

    def feature_description(self, config: ModelConfig) -> dict[str, object]:
        """Everything that determines the frozen tower's output for given image bytes, as plain JSON."""
        return weights_description(config)

    def image_processor(self, config: ModelConfig) -> BaseImageProcessor:
        """Always by Pillow, as that of `llava`."""
        vision, grids = pretrained_config(config).vision_config, image_form_of(config).grids
        assert grids is not None
        settings = {
            "size": {"shortest_edge": grids.min_pixels, "longest_edge": grids.max_pixels},
            "patch_size": grids.patch,
            "temporal_patch_size": int(vision.temporal_patch_size),
            "merge_size": grids.merge,
        }
        if config.tower.weights:
            return load_pretrained(AutoImageProcessor, config.tower, backend="pil", **settings)
        return Qwen2VLImageProcessorPil(**settings)

    def shape(self, config: ModelConfig) -> ModelShape:
        """Sizes, with the parameters counted on the meta device; images have the most tokens possible."""
        whole, grids = pretrained_config(config), image_form_of(config).grids
        assert grids is not None
        vision, text = whole.vision_config, whole.text_config
        with torch.device("meta"):
            model = self.skeleton(config, vocabulary=vocabulary_of(config, text))
        visual = model.model.visual
        in_mergers = sum(count_parameters(merger) for merger in mergers_of(visual))
        windows = None
        if full_layers := getattr(vision, "fullatt_block_indexes", None):
            windows = Windows(int(vision.window_size) // grids.merge // grids.patch, len(full_layers))
        return model_shape(
            config,
            model,
            visual.blocks,
            vision,
            tower_parameters=count_parameters(visual) - in_mergers,
            projector_parameters=in_mergers,
            tower_tokens=grids.max_tokens * grids.merge**2,
            image_tokens=grids.max_tokens,
            feature_width=self.feature_shape(config)[0],
            patch_pixels=patch_numbers(config),
            merge=grids.merge,
            levels=len(mergers_of(visual)),
            windows=windows,
        )

    def build_tower(self, config: ModelConfig) -> nn.Module:
        return without_mergers(self.build_vision(config))

    @torch.no_grad()
    def encode(
        self,
        config: ModelConfig,
        tower: nn.Module,
        pixel_values: Tensor,
        grids: Sequence[Grid] | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> list[Tensor]:
        """Features of each image, (tokens, numbers) in `dtype`: input of the mergers.

        pixel_values: (patches, numbers) of all images; grids: of each. bf16 is what the cache stores; training without
        a cache rounds the same way where the tower is frozen.
        """
        assert grids is not None
        sizes = sizes_of(tower, grids, pixel_values.device)
        features = tower_output(tower, pixel_values, sizes).to(dtype)
        return list(features.split([math.prod(grid) // int(tower.config.spatial_merge_size) ** 2 for grid in grids]))

    def tower(self, model: nn.Module) -> nn.Module:
        return without_mergers(model.model.visual)

    def project(self, model: nn.Module, features: Tensor) -> Tensor:
        """(tokens, levels x numbers) -> (tokens, levels x hidden)."""
        return project(model.model.visual, features)

    def generation_inputs(
        self,
        model: nn.Module,
        input_ids: Tensor,
        projected: Tensor,
        grids: Tensor | None = None,
    ) -> dict[str, object]:
        """Tokens, and projected features for the library's own hook. It derives three-axis positions from `grids`."""
        return {
            "input_ids": input_ids,
            "mm_token_type_ids": (input_ids == model.config.image_token_id).int(),
            "image_grid_thw": grids,
            "mm_encoder_outputs": {"image": encoder_output(projected, model.model.visual)},
        }

    def training_module(self, config: ModelConfig, model: nn.Module, *, cached: bool) -> nn.Module:
        return QwenVLM(config, model, cached=cached)

    def blocks(self, module: QwenVLM) -> ShardingUnits:
        visual = module.model.model.visual
        levels = len(mergers_of(visual)) - 1  # DeepStack adds one behind each of the first language layers
        return module.sharding_units(tower_layers_of(visual), image_layers=levels)


def patch_numbers(config: ModelConfig) -> int:
    """Numbers of one patch as the tower takes it: a still image is repeated along the time axis."""
    vision = pretrained_config(config).vision_config
    return int(vision.in_channels) * int(vision.temporal_patch_size) * int(vision.patch_size) ** 2
