"""Turns image bytes into the pixel values that a tower expects."""

from __future__ import annotations

import functools
import io
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import CLIPImageProcessorPil, SiglipImageProcessorPil, SmolVLMImageProcessorPil

from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.models.hf.processor import PublishedImages, join
from vlmpipe.trainer.models.image_inputs import Grid, Images, PrepareImages
from vlmpipe.trainer.models.image_tokens import image_form_of
from vlmpipe.trainer.models.registry import family_of
from vlmpipe.trainer.models.video_file import frames_of
from vlmpipe.trainer.sizing.image_tiles import ImageTiles

POINTWISE = (CLIPImageProcessorPil, SiglipImageProcessorPil)  # after resizing, they map each value on its own


def image_preparer(config: ModelConfig) -> PrepareImages:
    """Decodes the family's images into pixel values."""
    form = image_form_of(config)
    if form.published:
        return functools.partial(published_inputs, form.published)
    if form.grids:
        return PatchPreparer(config)
    if form.tiles:
        return TilePreparer(config, form.tiles)
    square = PixelPreparer(config)
    return lambda images, _samples=None: Images(square(images))


def images_within(config: ModelConfig, tiles: int) -> int:
    """How many images have at most `tiles` tiles; at least 1."""
    return max(1, tiles // image_form_of(config).most_tiles)


def opened(images: Sequence[bytes]) -> Iterator[Image.Image]:
    """Decoded images. Prepared data holds complete, upright JPEG and PNG images of 8 bits a channel only."""
    return (Image.open(io.BytesIO(data), formats=("JPEG", "PNG")).convert("RGB") for data in images)


def fill(place: np.ndarray, values: np.ndarray, tables: np.ndarray) -> None:
    """Map `values` (side, side, 3) through `tables` (3, 256) into `place` (3, side, side)."""
    for channel, table in enumerate(tables):
        np.take(table, values[..., channel], out=place[channel], mode="clip")  # other modes copy first


def published_inputs(
    published: PublishedImages, images: Sequence[bytes], samples: Sequence[int] | None = None
) -> Images:
    """What a model's own processor makes of images: of one sample after the other, because it may count them."""
    pictures = opened(images)
    counts = [1] * len(images) if samples is None else samples
    return Images(join([published.tensors(list(itertools.islice(pictures, count))) for count in counts if count]))


class PatchPreparer:
    """Decodes images and cuts them into patches with the family's own image processor."""

    def __init__(self, config: ModelConfig) -> None:
        self._processor = family_of(config).image_processor(config)
        self._numbers = (3, self._processor.temporal_patch_size, self._processor.patch_size**2)  # of a patch

    def __call__(self, images: Sequence[bytes], _samples: Sequence[int] | None = None) -> Images:
        """Encoded images and videos, possibly none -> (patches, numbers) in fp32, and grids."""
        made = [self._patches(data) for data in images]
        none = np.empty((0, math.prod(self._numbers)), np.float32)
        return Images(
            torch.from_numpy(np.concatenate([none, *(patches for patches, _ in made)])),
            tuple(grid for _, grid in made),
        )

    def _patches(self, data: bytes) -> tuple[np.ndarray, Grid]:
        """(patches, numbers) and the grid of an image, or of a video whose frames are all of one size."""
        made = [self._processor([picture], return_tensors="np") for picture in opened(frames_of(data))]
        ((_, rows, columns),) = made[0]["image_grid_thw"].tolist()
        if len(made) == 1:
            return made[0]["pixel_values"], (1, rows, columns)
        colours, frames, pixels = self._numbers
        # As an image, each frame fills all places in time of its patches; of the n-th in a patch, the n-th is taken.
        shape = (len(made) // frames, frames, rows * columns, colours, frames, pixels)
        still = np.stack([one["pixel_values"] for one in made]).reshape(shape)
        moving = np.stack([still[:, number, :, :, number] for number in range(frames)], axis=3)
        return moving.reshape(-1, math.prod(self._numbers)), (len(made) // frames, rows, columns)


class TilePreparer:
    """Decodes images and cuts them into tiles: the bits of the family's own image processor, in less time.

    Raises ConfigError for a processor of another class, whose tiles may differ from those counted.
    """

    def __init__(self, config: ModelConfig, tiles: ImageTiles) -> None:
        processor = family_of(config).image_processor(config)
        if type(processor) is not SmolVLMImageProcessorPil:
            raise ConfigError(
                f"the image processor of model.pretrained is a {type(processor).__name__}, whose tiles are not "
                "known here",
                expected="SmolVLM's own, or none in the folder",
                fix="take model.longest_edge out: images are then one tile each",
            )
        self._tiles, self._resample = tiles, processor.resample
        ramp = np.tile(np.arange(256, dtype=np.uint8), (3, 1, 1))
        scaled = processor.rescale(ramp, processor.rescale_factor) if processor.do_rescale else ramp
        normal = processor.normalize(scaled, processor.image_mean, processor.image_std)
        self._tables = np.asarray(normal if processor.do_normalize else scaled, np.float32)[:, 0]

    def __call__(self, images: Sequence[bytes], _samples: Sequence[int] | None = None) -> Images:
        """Encoded images, possibly none -> (tiles, 3, side, side) in fp32, image after image."""
        cut = [list(self._cut(picture)) for picture in opened(images)]
        pixels = torch.empty(sum(map(len, cut)), 3, self._tiles.side, self._tiles.side)
        for place, tile in zip(pixels.numpy(), itertools.chain(*cut), strict=True):
            fill(place, tile, self._tables)
        return Images(pixels, tiles=tuple(map(len, cut)))

    def _cut(self, picture: Image.Image) -> Iterator[np.ndarray]:
        """(side, side, 3) for each tile: row by row, then the whole image."""
        (rows, columns), side = self._tiles.of(*picture.size), self._tiles.side
        picture = picture.resize(self._tiles.resized(*picture.size), self._resample)
        picture = picture.resize((columns * side, rows * side), self._resample)
        values = np.asarray(picture)
        for row in range(rows):
            for column in range(columns):
                yield values[row * side : (row + 1) * side, column * side : (column + 1) * side]
        yield np.asarray(picture.resize((side, side), self._resample))


class PixelPreparer:
    """Decodes and resizes images: the bits of the family's own image processor, in less time."""

    def __init__(self, config: ModelConfig) -> None:
        self._processor = family_of(config).image_processor(config)
        self._side = config.image_size
        self._tables = self._tables_of_values() if type(self._processor) in POINTWISE else None

    def __call__(self, images: Sequence[bytes]) -> Tensor:
        """Encoded images, possibly none -> (images, 3, side, side) in fp32."""
        pixels = torch.empty(len(images), 3, self._side, self._side)
        for place, picture in zip(pixels.numpy(), opened(images), strict=True):
            if self._tables is None:
                made = self._processor([picture], return_tensors="np")["pixel_values"]
                place[:] = made.reshape(place.shape)  # some processors add an axis
                continue
            resized = np.asarray(picture.resize((self._side, self._side), self._processor.resample))
            fill(place, resized, self._tables)
        return pixels

    def _tables_of_values(self) -> np.ndarray | None:
        """(3, 256) rescaled and normalized values; None if the processor does not resize."""
        if not self._processor.do_resize:
            return None
        ramp = np.repeat(np.arange(256, dtype=np.uint8)[None, :, None], 3, axis=2)
        made = self._processor([Image.fromarray(ramp)], do_resize=False, return_tensors="np")["pixel_values"]
        return np.asarray(made[0, :, 0], np.float32)
