"""Pictures of what the model is given: those that its image processor's own steps leave."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.support.data.prepared import encode
from tests.support.trainer.tiny_native import model_section
from vlmpipe.report.inspection.seen_images import SeenImages
from vlmpipe.trainer.config.model import ModelConfig

TILE = 16  # pixels of a side
QWEN = {
    "vision_config": {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "hidden_size": 16},
    "text_config": {"hidden_size": 16},
}


def config(family: str, **fields: Any) -> ModelConfig:
    if family == "llava":
        tower, language = {"config": {"model_type": "siglip_vision_model"}}, {"language_model": {"weights": "none"}}
        return ModelConfig(tower=tower, tokenizer="train:300", **language, **fields)  # type: ignore[arg-type]
    pretrained = {"config": {"model_type": family, **QWEN}}
    return ModelConfig(family=family, pretrained=pretrained, tokenizer="train:300", **fields)  # type: ignore[arg-type]


def halves(width: int, height: int) -> Image.Image:
    """Red on the left, blue below right, green above right: no two ways to turn it look alike."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[:, : width // 2, 0] = 255
    pixels[: height // 2, width // 2 :, 1] = 255
    pixels[height // 2 :, width // 2 :, 2] = 255
    return Image.fromarray(pixels)


def same(seen: Image.Image, expected: Image.Image) -> bool:
    return seen.size == expected.size and int(np.abs(np.asarray(seen, int) - np.asarray(expected, int)).max()) <= 1


def test_squares_are_shown_resized() -> None:
    (seen,) = SeenImages(config("llava", image_size=32))([encode(halves(64, 32))])
    assert same(seen, halves(64, 32).resize((32, 32), Image.Resampling.BICUBIC))


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_patches_are_put_together_in_their_order(family: str) -> None:
    images = [halves(32, 16), halves(16, 24)]
    seen = SeenImages(config(family, max_pixels=4096))([encode(image) for image in images])
    assert len(seen) == 2 and all(same(*pair) for pair in zip(seen, images, strict=True))


def test_tiles_are_shown_row_by_row_before_the_whole_image() -> None:
    model = ModelConfig.model_validate(model_section("smolvlm", longest_edge=2 * TILE))
    *tiles, whole = SeenImages(model)([encode(halves(2 * TILE, 2 * TILE))])
    middles = [tile.getpixel((TILE // 2, TILE // 2)) for tile in tiles]
    assert middles == [(255, 0, 0), (0, 255, 0), (255, 0, 0), (0, 0, 255)]
    assert whole.size == (TILE, TILE)


def test_a_grey_picture_and_none() -> None:
    seen = SeenImages(config("llava", image_size=16))
    assert seen([]) == []
    (grey,) = seen([encode(Image.new("L", (16, 16), 77))])
    assert grey.getpixel((3, 3)) == (77, 77, 77)
