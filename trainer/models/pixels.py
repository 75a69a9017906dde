"""Decoded images, and tables of what an image processor makes of each value of a pixel."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from PIL import Image


def opened(data: bytes) -> Image.Image:
    """An image whose header is read. Prepared data holds complete, upright JPEG and PNG images of 8 bits a channel."""
    return Image.open(io.BytesIO(data), formats=("JPEG", "PNG"))


def decoded(data: bytes) -> Image.Image:
    """The image in RGB."""
    image = opened(data)
    if image.mode != "RGB":
        return image.convert("RGB")
    image.load()  # `convert` would copy it
    return image


def empty_values(*shape: int) -> np.ndarray:
    """Room for pixel values in fp32. NumPy asks the kernel for huge pages where torch does not: filling new memory with
    zeros, page by page, would take a third of an image's time."""
    return np.empty(shape, np.float32)


def value_tables(processor: Any) -> np.ndarray:
    """(channels, 256) what a processor of transformers, by Pillow, makes of each value: rescaled and normalized."""
    ramp = np.tile(np.arange(256, dtype=np.uint8), (3, 1, 1))
    scaled = processor.rescale(ramp, processor.rescale_factor) if processor.do_rescale else ramp
    normal = processor.normalize(scaled, processor.image_mean, processor.image_std)
    return np.asarray(normal if processor.do_normalize else scaled, np.float32)[:, 0]


def fill(place: np.ndarray, values: np.ndarray, tables: np.ndarray) -> None:
    """Map `values` (side, side, 3) through `tables` (3, 256) into `place` (3, side, side)."""
    for channel, table in enumerate(tables):
        np.take(table, values[..., channel], out=place[channel], mode="clip")  # other modes copy first
