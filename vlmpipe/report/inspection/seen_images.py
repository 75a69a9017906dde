"""Pixel values that a model is given, turned back into colours, for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.models.hf.processor import PublishedImages
from vlmpipe.trainer.models.image_processor import image_preparer
from vlmpipe.trainer.models.image_tokens import image_form_of
from vlmpipe.trainer.models.registry import family_of

if TYPE_CHECKING:
    from transformers import BaseImageProcessor

COLOURS = PIXEL_AXES = 3  # (colours, height, width)


class SeenImages:
    """Shows images as the model's own preprocessing leaves them: resized, cropped, cut into tiles."""

    def __init__(self, config: ModelConfig) -> None:
        self._prepare, self._form = image_preparer(config), image_form_of(config)
        published: PublishedImages | None = self._form.published
        self._processor: BaseImageProcessor = (
            published.processor.image_processor if published else family_of(config).image_processor(config)
        )

    def __call__(self, images: Sequence[bytes]) -> list[Image.Image]:
        """Viewable images of a sample's encoded images, several of one that is cut into tiles.

        Empty where the model's pixel values have a form of their own, which cannot be shown.
        """
        made = self._prepare(images, [len(images)])
        values, grids = made.values, made.grids
        if not isinstance(values, Tensor):
            listed, pixels = values.get("image_grid_thw"), values.get("pixel_values", torch.empty(0))
            grids = tuple(listed.tolist()) if isinstance(listed, Tensor) else None
            assert isinstance(pixels, Tensor)
            values = pixels
        if grids is not None:
            # Of a video, the first frame of each patch in time.
            sizes = [(int(rows), int(columns)) for times, rows, columns in grids for _ in range(int(times))]
            if not self._folds(values):
                return []
            of_each = values.split([rows * columns for rows, columns in sizes])
            return [self._unfolded(patches, *size) for patches, size in zip(of_each, sizes, strict=True)]
        tiles = values.reshape(-1, *values.shape[-PIXEL_AXES:])
        if tiles.ndim != PIXEL_AXES + 1 or tiles.shape[1] != COLOURS:
            return []
        return [self._image(tile) for tile in tiles.float().numpy() if tile.any()]  # padding is zeros

    def _folds(self, patches: Tensor) -> bool:
        processor = self._processor
        numbers = COLOURS * getattr(processor, "temporal_patch_size", 1) * processor.patch_size**2
        return patches.ndim == 2 and patches.shape[1] == numbers and hasattr(processor, "merge_size")

    def _unfolded(self, patches: Tensor, rows: int, columns: int) -> Image.Image:
        """From (rows x columns, numbers), blocks of merge x merge patches one after the other, to an image."""
        side, merge, frames = (
            self._processor.patch_size,
            self._processor.merge_size,
            self._processor.temporal_patch_size,
        )
        shape = (rows // merge, columns // merge, merge, merge, COLOURS, frames, side, side)
        first = patches.float().numpy().reshape(shape)[:, :, :, :, :, 0]  # a still image is repeated in time
        return self._image(first.transpose(4, 0, 2, 5, 1, 3, 6).reshape(COLOURS, rows * side, columns * side))

    def _image(self, values: np.ndarray) -> Image.Image:
        """From (3, height, width), normalized."""
        processor = self._processor
        if processor.do_normalize:
            mean, deviation = (
                np.asarray(scale, np.float32)[:, None, None] for scale in (processor.image_mean, processor.image_std)
            )
            values = values * deviation + mean
        if processor.do_rescale:
            values = values / processor.rescale_factor
        return Image.fromarray(values.round().clip(0, 255).astype(np.uint8).transpose(1, 2, 0))
