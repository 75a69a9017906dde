"""Image bytes to the pixel values that a tower expects."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import CLIPImageProcessorPil, SiglipImageProcessorPil

from trainer.model_config import ModelConfig
from trainer.models.image_tokens import image_form_of
from trainer.models.images import Images, PrepareImages
from trainer.models.table import family_of

POINTWISE = (CLIPImageProcessorPil, SiglipImageProcessorPil)  # after resizing, each value depends on itself alone


def image_preparer(config: ModelConfig) -> PrepareImages:
    """What makes pixel values of the family's images."""
    form = image_form_of(config)
    if form.grids:
        return PatchPreparer(config)
    if form.tiles:
        return TilePreparer(config)
    square = PixelPreparer(config)
    return lambda images: Images(square(images))


def images_within(config: ModelConfig, tiles: int) -> int:
    """So many images that they have at most `tiles` tiles, each of one that is not cut; at least one image."""
    return max(1, tiles // image_form_of(config).most_tiles)


def opened(images: Sequence[bytes]) -> Iterator[Image.Image]:
    """Preparation left only whole, upright JPEG and PNG pictures of 8 bits a channel."""
    return (Image.open(io.BytesIO(data), formats=("JPEG", "PNG")).convert("RGB") for data in images)


class PatchPreparer:
    """Decodes images and cuts them into patches, each image in its own shape, by the family's own image processor."""

    def __init__(self, config: ModelConfig) -> None:
        self._processor = family_of(config).image_processor(config)
        side, frames = self._processor.patch_size, self._processor.temporal_patch_size
        self._numbers = 3 * frames * side**2  # of a patch

    def __call__(self, images: Sequence[bytes]) -> Images:
        """Encoded images -> (patches, numbers) fp32 and (images, 3) grids; also for no images at all."""
        made = [self._processor([picture], return_tensors="np") for picture in opened(images)]
        patches = np.concatenate([np.empty((0, self._numbers), np.float32), *(one["pixel_values"] for one in made)])
        grids = np.concatenate([np.empty((0, 3), np.int64), *(one["image_grid_thw"] for one in made)])
        return Images(torch.from_numpy(patches), torch.from_numpy(grids))


class TilePreparer:
    """Decodes images and cuts them into tiles, by the family's own image processor."""

    def __init__(self, config: ModelConfig) -> None:
        self._processor, self._side = family_of(config).image_processor(config), config.image_size

    def __call__(self, images: Sequence[bytes]) -> Images:
        """Encoded images -> (tiles, 3, side, side) fp32, image after image; also for no images at all."""
        made = [self._tiles(picture) for picture in opened(images)]
        tiles = np.concatenate([np.empty((0, 3, self._side, self._side), np.float32), *made])
        return Images(torch.from_numpy(tiles), tiles=tuple(len(one) for one in made))

    def _tiles(self, picture: Image.Image) -> np.ndarray:
        # Padded are images of one prompt to as many tiles: here each is alone, and its mask would say nothing.
        made = self._processor([[picture]], do_pad=False, return_tensors="np")["pixel_values"]
        return np.asarray(made[0], np.float32)


class PixelPreparer:
    """Decodes and resizes as the family's own image processor does: to the same bits, in less time."""

    def __init__(self, config: ModelConfig) -> None:
        self._processor = family_of(config).image_processor(config)
        self._side = config.image_size
        self._tables = self._tables_of_values() if type(self._processor) in POINTWISE else None

    def __call__(self, images: Sequence[bytes]) -> Tensor:
        """Encoded images -> (images, 3, side, side) fp32; also for no images at all."""
        pixels = torch.empty(len(images), 3, self._side, self._side)
        for place, picture in zip(pixels.numpy(), opened(images), strict=True):
            if self._tables is None:
                made = self._processor([picture], return_tensors="np")["pixel_values"]
                place[:] = made.reshape(place.shape)  # of some with an axis more
                continue
            resized = np.asarray(picture.resize((self._side, self._side), self._processor.resample))
            for channel, table in enumerate(self._tables):
                np.take(table, resized[..., channel], out=place[channel], mode="clip")  # other modes make a copy first
        return pixels

    def _tables_of_values(self) -> np.ndarray | None:
        """(3, 256) what rescaling and normalizing make of each value; None where pictures are not resized."""
        if not self._processor.do_resize:
            return None
        ramp = np.repeat(np.arange(256, dtype=np.uint8)[None, :, None], 3, axis=2)
        made = self._processor([Image.fromarray(ramp)], do_resize=False, return_tensors="np")["pixel_values"]
        return np.asarray(made[0, :, 0], np.float32)
