"""How many tokens an image takes. Counted without torch where the tower's configuration says all that decides it.

Processes that prepare data need nothing else of the model, and importing torch and transformers' models takes longer
than preparing a thousand records.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from trainer.config import ModelConfig, WeightsConfig
from trainer.models.table import family_of

ImageTokens = Callable[[int, int], int]  # (width, height) in pixels -> tokens
CLIP = "clip_vision_model"
KNOWN_TOWERS = (CLIP, "siglip_vision_model")  # others are looked up in transformers, which also knows what is no tower


def image_tokens_of(config: ModelConfig) -> ImageTokens:
    """The rule by which the model's family counts tokens of an image. Imports torch only where it must."""
    vision = _stated(config.tower)
    if config.family == "llava" and vision.get("model_type") in KNOWN_TOWERS and "patch_size" in vision:
        count = square_tokens(config, str(vision["model_type"]), int(vision["patch_size"]))
        return lambda width, height: count
    family = family_of(config)
    return cache(lambda width, height: family.image_tokens(config, width, height))


def square_tokens(config: ModelConfig, tower_type: str, patch_size: int) -> int:
    """Language-model tokens of an image that is resized to the square of `image_size`; `patch_size` in pixels."""
    side = config.image_size // patch_size
    return side * side + (1 if tower_type == CLIP and config.feature_select == "full" else 0)


def _stated(tower: WeightsConfig) -> dict[str, Any]:
    """The vision encoder's configuration as far as it is written down; what is left out is transformers' to say."""
    content: Any = tower.config
    if tower.weights:
        file = Path(tower.weights, "config.json")
        try:
            content = json.loads(file.read_text()) if file.is_file() else {}
        except ValueError:  # transformers says what is wrong with it
            return {}
    vision = content.get("vision_config", content) if isinstance(content, dict) else {}
    return vision if isinstance(vision, dict) else {}
