"""Copies of an image are alike whatever changed them, and images of another thing are not."""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image, ImageEnhance

from vlmpipe.trainer.audit.images.likeness import are_alike, look_of


def scene(seed: int, side: int = 96) -> Image.Image:
    """Smooth coloured shapes."""
    coarse = np.random.default_rng(seed).integers(0, 200, (5, 5, 3), np.uint8)
    return Image.fromarray(coarse).resize((side, side), Image.Resampling.BICUBIC)


def _saved(image: Image.Image, form: str) -> Image.Image:
    buffer = io.BytesIO()
    image.save(buffer, form, quality=60)
    return Image.open(buffer).convert("RGB")


COPIES: dict[str, Callable[[Image.Image], Image.Image]] = {
    "JPEG": lambda image: _saved(image, "JPEG"),
    "WebP": lambda image: _saved(image, "WEBP"),
    "resized": lambda image: image.resize((61, 61)),
    "cropped": lambda image: image.crop((3, 3, 93, 93)),
    "brighter": lambda image: ImageEnhance.Brightness(image).enhance(1.15),
}


@pytest.mark.parametrize("kind", COPIES)
def test_a_copy_is_alike(kind: str) -> None:
    missed = [seed for seed in range(20) if not are_alike(look_of(scene(seed)), look_of(COPIES[kind](scene(seed))))]
    assert not missed


def test_other_images_and_blank_ones_are_not_alike() -> None:
    looks = [look_of(scene(seed)) for seed in range(20)]
    assert not any(are_alike(one, other) for number, one in enumerate(looks) for other in looks[:number])
    blank = look_of(Image.new("RGB", (50, 50), (200, 200, 200)))
    assert blank.is_blank and not are_alike(blank, blank)


def test_the_same_shape_in_another_colour_is_another_image() -> None:
    red, blue = (Image.merge("RGB", bands) for bands in _in_colours(scene(1).convert("L")))
    assert not are_alike(look_of(red), look_of(blue))


def _in_colours(grey: Image.Image) -> tuple[tuple[Image.Image, ...], tuple[Image.Image, ...]]:
    black = Image.new("L", grey.size)
    return (grey, black, black), (black, black, grey)
