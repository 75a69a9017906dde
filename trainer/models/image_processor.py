"""Turns image bytes into the pixel values that a tower expects."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import CLIPImageProcessorPil, SiglipImageProcessorPil

from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.models.hf.processor import PublishedImages, join
from vlmpipe.trainer.models.image_inputs import Images, PrepareImages
from vlmpipe.trainer.models.image_patches import PatchPreparer
from vlmpipe.trainer.models.image_threads import for_each
from vlmpipe.trainer.models.image_tokens import image_form_of
from vlmpipe.trainer.models.pixels import decoded, empty_values, value_tables
from vlmpipe.trainer.models.registry import family_of

POINTWISE = (CLIPImageProcessorPil, SiglipImageProcessorPil)  # after resizing, they map each value on its own


def image_preparer(config: ModelConfig) -> PrepareImages:
    """Decodes the family's images into pixel values."""
    form = image_form_of(config)
    if form.published:
        return functools.partial(published_inputs, form.published)
    if form.grids:
        return PatchPreparer(family_of(config).image_processor(config), form.grids)
    square = PixelPreparer(config)
    return lambda images, _samples=None: Images(square(images))


def published_inputs(
    published: PublishedImages, images: Sequence[bytes], samples: Sequence[int] | None = None
) -> Images:
    """Pixels from a model's own processor: of each sample by itself, because it may count them."""
    pixels = iter(for_each(decoded, images))
    counts = [1] * len(images) if samples is None else samples
    of_samples = [list(itertools.islice(pixels, count)) for count in counts if count]
    return Images(join(for_each(published.tensors, of_samples)))


class PixelPreparer:
    """Decodes and resizes images: the bits of the family's own image processor, in less time."""

    def __init__(self, config: ModelConfig) -> None:
        self._processor, self._side = family_of(config).image_processor(config), config.image_size
        is_pointwise = type(self._processor) in POINTWISE and self._processor.do_resize
        self._tables = value_tables(self._processor) if is_pointwise else None

    def __call__(self, images: Sequence[bytes]) -> Tensor:
        """Encoded images, possibly none -> (images, 3, side, side) in fp32."""
        pixels = empty_values(len(images), 3, self._side, self._side)
        for_each(lambda pair: self._fill(*pair), list(zip(images, pixels, strict=True)))
        return torch.from_numpy(pixels)

    def _fill(self, data: bytes, place: np.ndarray) -> None:
        image = decoded(data)
        if self._tables is None:
            made = self._processor([image], return_tensors="np")["pixel_values"]
            place[:] = made.reshape(place.shape)  # some processors add an axis
            return
        resized = np.asarray(image.resize((self._side, self._side), self._processor.resample))
        for channel, table in enumerate(self._tables):
            np.take(table, resized[..., channel], out=place[channel], mode="clip")  # other modes copy first
