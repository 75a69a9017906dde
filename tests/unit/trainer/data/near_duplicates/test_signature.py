"""Signatures of images: copies are near, other images are not, and the machine does not matter."""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageOps

from vlmpipe.trainer.data.near_duplicates.search import as_signatures
from vlmpipe.trainer.data.near_duplicates.signature import (
    MAX_COLOUR_DISTANCE,
    MAX_HASH_DISTANCE,
    SIGNATURE_BYTES,
    colour_distance,
    hash_distance,
    image_signature,
)


def photo(seed: int = 0, size: tuple[int, int] = (320, 240)) -> Image.Image:
    """Coloured blobs without hard edges, as in a photo."""
    cells = np.random.default_rng(seed).integers(0, 255, (12, 16, 3), dtype=np.uint8)
    return Image.fromarray(cells).resize(size, Image.Resampling.BICUBIC)


def jpeg(image: Image.Image, quality: int) -> Image.Image:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=quality)
    return Image.open(buffer)


def look_alike(one: bytes, other: bytes) -> bool:
    a, b = as_signatures([one]), as_signatures([other])
    return bool(hash_distance(a, b)[0] <= MAX_HASH_DISTANCE and colour_distance(a, b)[0] <= MAX_COLOUR_DISTANCE)


COPIES: dict[str, Callable[[Image.Image], Image.Image]] = {
    "the same pixels": lambda image: image.copy(),
    "a JPEG of low quality": lambda image: jpeg(image, 30),
    "half the size": lambda image: image.resize((image.width // 2, image.height // 2), Image.Resampling.BICUBIC),
    "larger, then a JPEG": lambda image: jpeg(image.resize((image.width * 13 // 10, image.height * 13 // 10)), 75),
    "darker": lambda image: ImageEnhance.Brightness(image).enhance(0.85),
    "less contrast": lambda image: ImageEnhance.Contrast(image).enhance(0.8),
}
OTHERS: dict[str, Callable[[Image.Image], Image.Image]] = {
    "another image": lambda _: photo(1),
    "other colours": lambda image: Image.merge("RGB", image.split()[::-1]),
    "mirrored": ImageOps.mirror,
    "cropped by a tenth": lambda image: image.crop((32, 24, 320, 240)),
}


@pytest.mark.parametrize("change", [pytest.param(change, id=name) for name, change in COPIES.items()])
def test_copies_look_alike(change: Callable[[Image.Image], Image.Image]) -> None:
    assert look_alike(image_signature(photo()), image_signature(change(photo())))


@pytest.mark.parametrize("change", [pytest.param(change, id=name) for name, change in OTHERS.items()])
def test_other_images_and_what_a_signature_does_not_see_do_not(change: Callable[[Image.Image], Image.Image]) -> None:
    assert not look_alike(image_signature(photo()), image_signature(change(photo())))


def test_an_image_without_structure_has_no_signature() -> None:
    assert image_signature(Image.new("RGB", (64, 64), "white")) == b""
    almost = Image.new("L", (64, 64), 200)
    almost.putpixel((5, 5), 203)
    assert image_signature(almost) == b""


def test_a_signature_is_of_pixels_whatever_the_mode_and_always_the_same() -> None:
    grey = photo().convert("L")
    assert image_signature(grey) == image_signature(grey.convert("RGB"))
    signature = image_signature(photo(size=(64, 64)))
    assert len(signature) == SIGNATURE_BYTES
    # Prepared data is compared byte by byte between machines: whole numbers only, of Pillow's resizing too.
    assert signature.hex()[:24] == "a8635a32975bcfa6e5255989"
