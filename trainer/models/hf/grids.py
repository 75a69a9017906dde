"""Images as grids of patches, whose sizes the loader knows: their encoder and mergers, by the library's own modules.

The host then waits for no value of the device: positions come from the loader too, and features are put at their places
by number.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import (
    AutoImageProcessor,
    BaseImageProcessor,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
)
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING

from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.models.grid_images import VIDEO_TOKEN, VISION_END, VISION_START
from vlmpipe.trainer.models.hf.encoder import merged, mergers_of, patches_of_a_token
from vlmpipe.trainer.models.hf.vision_attention import sizes_of
from vlmpipe.trainer.models.hf_native.pretrained import load_pretrained, part_config
from vlmpipe.trainer.models.image_inputs import Grid
from vlmpipe.trainer.models.layers.parameter_counts import OfImages
from vlmpipe.trainer.sizing.image_grids import ImageGrids
from vlmpipe.trainer.sizing.model_shape import Windows

NO_TOKEN = -1  # no token has this id
SPLIT_TYPES = ("qwen2_5_vl", "qwen3_vl")  # model types whose encoder tensor parallelism splits too


def set_marks(whole: PreTrainedConfig, tokenizer: PreTrainedTokenizerFast) -> None:
    """Give a configuration the tokenizer's tokens around images, and that of videos, where it has fields for them."""
    if not hasattr(whole, "vision_start_token_id"):
        return
    whole.vision_start_token_id = tokenizer.convert_tokens_to_ids(VISION_START)
    whole.vision_end_token_id = tokenizer.convert_tokens_to_ids(VISION_END)
    video_token_id = tokenizer.backend_tokenizer.token_to_id(VIDEO_TOKEN)
    if video_token_id is not None:
        whole.video_token_id = video_token_id
    elif whole.video_token_id < len(tokenizer):
        whole.video_token_id = NO_TOKEN  # the default is some other token of this tokenizer


def image_processor_of(config: ModelConfig, grids: ImageGrids) -> BaseImageProcessor:
    """The processor that makes these grids, by Pillow."""
    whole = part_config(config.tower)
    settings = {
        "size": {"shortest_edge": grids.min_pixels, "longest_edge": grids.max_pixels},
        "patch_size": grids.patch,
        "temporal_patch_size": int(whole.vision_config.temporal_patch_size),
        "merge_size": grids.merge,
    }
    if config.tower.weights:
        return load_pretrained(AutoImageProcessor, config.tower, backend="pil", **settings)
    return IMAGE_PROCESSOR_MAPPING[type(whole)]["pil"](**settings)


def patch_numbers(vision: PreTrainedConfig) -> int:
    """Numbers of one patch as the tower takes it: a still image is repeated along the time axis."""
    return int(vision.in_channels) * int(vision.temporal_patch_size) * int(vision.patch_size) ** 2


def of_images(whole: PreTrainedConfig, grids: ImageGrids, feature_width: int, levels: int) -> OfImages:
    """Sizes of images with the most tokens possible."""
    vision, windows = whole.vision_config, None
    if full_layers := getattr(vision, "fullatt_block_indexes", None):
        windows = Windows(int(vision.window_size) // grids.merge // grids.patch, len(full_layers))
    return {
        "tower_tokens": grids.max_tokens * grids.merge**2,
        "image_tokens": grids.max_tokens,
        "feature_width": feature_width,
        "patch_pixels": patch_numbers(vision),
        "merge": grids.merge,
        "levels": levels,
        "windows": windows,
        "shards_tower": whole.model_type in SPLIT_TYPES,
    }


def tower_output(tower: nn.Module, patches: Tensor, sizes: dict[str, object]) -> Tensor:
    """Input of the mergers: (tokens, levels x patches of a token x hidden). sizes: see `sizes_of`."""
    # Without grids, a release of the library that ignores one of `sizes` fails instead of waiting for the device.
    output = tower(patches, grid_thw=None, **sizes)
    return torch.cat([output.pooler_output, *(getattr(output, "deepstack_features", None) or ())], dim=-1)


def features_of(tower: nn.Module, patches: Tensor, grids: Sequence[Grid]) -> list[Tensor]:
    """Input of the mergers for each image. patches: (patches, numbers) of all."""
    features = tower_output(tower, patches, sizes_of(tower, grids, patches.device))
    in_token = patches_of_a_token(tower)
    return list(features.split([times * rows * columns // in_token for times, rows, columns in grids]))


def project(encoder: nn.Module, features: Tensor) -> Tensor:
    """Apply each level's merger: (tokens, levels x numbers) -> (tokens, levels x hidden)."""
    mergers = mergers_of(encoder)
    rows = features.to(next(mergers[0].parameters()).dtype)
    return torch.cat(merged(rows, mergers, patches_of_a_token(encoder)), dim=-1)


def precomputed(projected: Tensor, encoder: nn.Module) -> BaseModelOutputWithPooling:
    """Projected features as the library's hook for precomputed encoder outputs takes them."""
    first, *deeper = projected.chunk(len(mergers_of(encoder)), dim=-1)
    output = BaseModelOutputWithPooling(pooler_output=[first])
    if deeper:
        output["deepstack_features"] = [[level] for level in deeper]
    return output
