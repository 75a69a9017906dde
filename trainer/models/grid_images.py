"""Images as grids of patches, by a model's configuration, without torch if that is complete."""

from __future__ import annotations

import json
from typing import Any

from vlmpipe.trainer.config.model import GRID_TYPES, ModelConfig
from vlmpipe.trainer.config.weights.origin import WeightsConfig
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.sizing.image_grids import ImageGrids
from vlmpipe.trainer.storage.model_folders import CONFIG, local_folder
from vlmpipe.trainer.storage.regular_files import read_regular

VISION_START, VISION_END = "<|vision_start|>", "<|vision_end|>"  # around images in the Qwen-VL models' prompts
VIDEO_TOKEN = "<|video_pad|>"
MIN_TOKENS = 4  # of an image without model.min_pixels: 56 x 56 pixels of Qwen2.5-VL
MAX_CONFIG_BYTES = 16 << 20


def grids_of(config: ModelConfig) -> ImageGrids | None:
    """How images become grids; None for models whose images become tokens otherwise.

    Raises ConfigError for a model type whose images are no such grids.
    """
    if config.image_kind != "grids":
        return None
    _, vision = type_and_vision(config)
    patch, merge = int(vision["patch_size"]), int(vision["spatial_merge_size"])
    assert config.max_pixels is not None, "checked by ModelConfig"
    min_pixels = min(MIN_TOKENS * (patch * merge) ** 2, config.max_pixels)
    return ImageGrids(patch, merge, config.min_pixels or min_pixels, config.max_pixels)


def type_and_vision(config: ModelConfig) -> tuple[str, dict[str, Any]]:
    """Type of a model whose images are grids, and its vision encoder's part of the configuration."""
    content = stated(config.tower)
    if not {"patch_size", "spatial_merge_size"} <= vision_of(content).keys():
        from vlmpipe.trainer.models.hf_native.pretrained import part_config

        content = part_config(config.tower).to_dict()
    kind = str(content.get("model_type", "")) if config.is_of_any_type else config.family
    if kind not in GRID_TYPES:
        raise ConfigError(
            f"model.max_pixels is set, and model.pretrained is a {kind} model",
            expected=f"a model of {', '.join(GRID_TYPES)}",
            fix="leave max_pixels out; model.image_processor has settings that bound the tokens of its images",
        )
    return kind, vision_of(content)


def stated(tower: WeightsConfig) -> dict[str, object]:
    """The model's configuration as written, without transformers' defaults; {} for an invalid file."""
    content: object = tower.config
    if tower.weights:
        folder = local_folder(tower.weights, tower.revision, weights=False)
        file = folder / CONFIG if folder else None
        try:
            content = json.loads(read_regular(file, MAX_CONFIG_BYTES)) if file and file.is_file() else {}
        except ValueError:  # transformers reports the error
            return {}
    return content if isinstance(content, dict) else {}


def vision_of(content: dict[str, object]) -> dict[str, Any]:
    """The vision encoder's part of a configuration."""
    vision = content.get("vision_config", content)
    return vision if isinstance(vision, dict) else {}
