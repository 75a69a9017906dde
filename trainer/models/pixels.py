"""Image bytes to the pixel values that a tower expects."""

from __future__ import annotations

import io
from collections.abc import Sequence

import torch
from PIL import Image
from torch import Tensor

from trainer.config import ModelConfig
from trainer.models.table import family_of


class PixelPreparer:
    """Decodes and resizes with the family's own image processor."""

    def __init__(self, config: ModelConfig) -> None:
        self._processor = family_of(config).image_processor(config)
        self._side = config.image_size

    def __call__(self, images: Sequence[bytes]) -> Tensor:
        """Encoded images -> (images, 3, side, side) fp32; also for no images at all."""
        if not images:
            return torch.empty(0, 3, self._side, self._side)
        # Preparation left only whole, upright JPEG and PNG pictures of 8 bits a channel.
        opened = [Image.open(io.BytesIO(data), formats=("JPEG", "PNG")).convert("RGB") for data in images]
        return self._processor(opened, return_tensors="pt")["pixel_values"]
