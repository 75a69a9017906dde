"""Image marks in prompts and image token counts, computed without torch where the model's configuration has all
that decides them.

Processes that prepare data need nothing else of the model, and importing torch and transformers' models takes longer
than preparing a thousand records.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from trainer.config.model import GRID_FAMILIES, IMAGE_TOKEN, ModelConfig, WeightsConfig
from trainer.models.registry import family_of
from trainer.sizing.image_grids import ImageGrids
from trainer.sizing.image_tiles import WHOLE, ImageTiles
from trainer.storage.regular_files import read_regular

ImageTokens = Callable[[int, int], int]  # (width, height) in pixels -> tokens
CLIP = "clip_vision_model"
KNOWN_TOWERS = (CLIP, "siglip_vision_model")  # others are looked up in transformers, which also knows what is no tower
VISION_START, VISION_END = "<|vision_start|>", "<|vision_end|>"  # what the Qwen-VL models have learnt to see images in
LEAST_TOKENS = 4  # of an image, where model.min_pixels does not say: 56 x 56 pixels of Qwen2.5-VL
LARGEST_CONFIG_BYTES = 16 << 20
PROBE_SIZES = ((64, 64), (640, 480), (480, 640), (1024, 1024))  # pixels; tell image token rules apart


@dataclass(frozen=True)
class ImageForm:
    """How images stand in a row of tokens."""

    mark: str = IMAGE_TOKEN  # text that stands for an image in a prompt; its image token is then repeated
    grids: ImageGrids | None = None  # None: all images are resized to one square, and positions count tokens
    is_in_tokenizer: bool = False  # the model's own tokenizer has the marks' tokens, and one without them is refused
    tiles: ImageTiles | None = None  # None: images are not cut, and all have the same mark

    @property
    def tile_tokens(self) -> int:
        """Tokens of a tile; 0 where images are not cut."""
        return self.tiles.tokens if self.tiles else 0

    @property
    def most_tiles(self) -> int:
        """Of an image."""
        return self.tiles.most if self.tiles else 1

    @property
    def control_tokens(self) -> tuple[str, ...]:
        """Tokens that marks are written with and `mark` does not show."""
        return self.tiles.control_tokens if self.tiles else ()

    def num_tiles(self, counts: Sequence[int]) -> int:
        """Tiles of images with these numbers of tokens, all together; an image that is not cut is one."""
        return sum(counts) // self.tiles.tokens if self.tiles else len(counts)

    def marks(self, sizes: Sequence[tuple[int, int]]) -> list[str]:
        """Text that stands for each image of these sizes, (width, height) in pixels."""
        return [self.tiles.mark(*size) for size in sizes] if self.tiles else [self.mark] * len(sizes)


SQUARES = ImageForm()


def image_form_of(config: ModelConfig) -> ImageForm:
    """Of the model's family. Imports torch only where it must."""
    if config.family == "smolvlm" and config.longest_edge:
        tiles = ImageTiles(config.image_size, config.longest_edge, _tile_tokens(config))
        return ImageForm(is_in_tokenizer=True, tiles=tiles)
    if config.family == "smolvlm":
        return ImageForm(WHOLE, is_in_tokenizer=True)
    if config.family not in GRID_FAMILIES:
        return SQUARES
    vision = vision_of(stated(config.tower))
    if not {"patch_size", "spatial_merge_size"} <= vision.keys():
        from trainer.models.hf_native.build import pretrained_config

        vision = pretrained_config(config).vision_config.to_dict()
    patch, merge = int(vision["patch_size"]), int(vision["spatial_merge_size"])
    assert config.max_pixels is not None, "the model section has checked it"
    least_pixels = min(LEAST_TOKENS * (patch * merge) ** 2, config.max_pixels)
    grids = ImageGrids(patch, merge, config.min_pixels or least_pixels, config.max_pixels)
    return ImageForm(f"{VISION_START}{IMAGE_TOKEN}{VISION_END}", grids)


def image_rule(config: ModelConfig) -> Any:
    """What decides the tokens of images, as plain JSON: part of the name of prepared data."""
    form = image_form_of(config)
    if form.grids:
        return {"mark": form.mark, **form.grids.as_dict()}
    if form.tiles:
        return {"mark": form.tiles.mark(1, 1), **form.tiles.as_dict()}
    image_tokens = image_tokens_of(config)
    counts = [image_tokens(*size) for size in PROBE_SIZES]
    return counts if form == SQUARES else {"mark": form.mark, "tokens": counts}


def image_tokens_of(config: ModelConfig) -> ImageTokens:
    """The rule by which the model's family counts tokens of an image. Imports torch only where it must."""
    form = image_form_of(config)
    if form.grids:
        return cache(form.grids.tokens)
    if tiles := form.tiles:
        return cache(lambda width, height: tiles.count(width, height) * tiles.tokens)
    content = stated(config.tower)
    vision = vision_of(content)
    if config.family == "llava" and vision.get("model_type") in KNOWN_TOWERS and "patch_size" in vision:
        count = square_tokens(config, str(vision["model_type"]), int(vision["patch_size"]))
        return lambda width, height: count
    if config.family == "smolvlm":
        count = _tile_tokens(config)
        return lambda width, height: count
    family = family_of(config)
    return cache(lambda width, height: family.image_tokens(config, width, height))


def _tile_tokens(config: ModelConfig) -> int:
    """Of SmolVLM, tokens of a square of `image_size`."""
    content: dict[str, Any] = stated(config.tower)
    if not ("patch_size" in vision_of(content) and "scale_factor" in content):
        from trainer.models.hf_native.build import pretrained_config

        content = pretrained_config(config).to_dict()
    return shuffled_tokens(config.image_size, int(vision_of(content)["patch_size"]), int(content["scale_factor"]))


def square_tokens(config: ModelConfig, tower_type: str, patch_size: int) -> int:
    """Language-model tokens of an image that is resized to the square of `image_size`; `patch_size` in pixels."""
    side = config.image_size // patch_size
    return side * side + (1 if tower_type == CLIP and config.feature_select == "full" else 0)


def shuffled_tokens(image_size: int, patch_size: int, scale_factor: int) -> int:
    """The same of SmolVLM, where a token is a square of `scale_factor` x `scale_factor` patches (pixel shuffle)."""
    return int((image_size // patch_size // scale_factor) ** 2)


def stated(tower: WeightsConfig) -> dict[str, Any]:
    """The model's configuration as far as it is written down; what is left out is transformers' to say."""
    content: Any = tower.config
    if tower.weights:
        file = Path(tower.weights, "config.json")
        try:
            content = json.loads(read_regular(file, LARGEST_CONFIG_BYTES)) if file.is_file() else {}
        except ValueError:  # transformers says what is wrong with it
            return {}
    return content if isinstance(content, dict) else {}


def vision_of(content: dict[str, Any]) -> dict[str, Any]:
    """That of the vision encoder in it."""
    vision = content.get("vision_config", content)
    return vision if isinstance(vision, dict) else {}
