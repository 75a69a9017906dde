"""Image bytes to the pixel values that a tower expects."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import CLIPImageProcessorPil, SiglipImageProcessorPil

from trainer.config import ModelConfig
from trainer.models.table import family_of

POINTWISE = (CLIPImageProcessorPil, SiglipImageProcessorPil)  # after resizing, each value depends on itself alone


class PixelPreparer:
    """Decodes and resizes as the family's own image processor does: to the same bits, in less time."""

    def __init__(self, config: ModelConfig) -> None:
        self._processor = family_of(config).image_processor(config)
        self._side = config.image_size
        self._tables = self._tables_of_values() if type(self._processor) in POINTWISE else None

    def __call__(self, images: Sequence[bytes]) -> Tensor:
        """Encoded images -> (images, 3, side, side) fp32; also for no images at all."""
        pixels = torch.empty(len(images), 3, self._side, self._side)
        # Preparation left only whole, upright JPEG and PNG pictures of 8 bits a channel.
        opened = (Image.open(io.BytesIO(data), formats=("JPEG", "PNG")).convert("RGB") for data in images)
        for place, picture in zip(pixels.numpy(), opened, strict=True):
            if self._tables is None:
                place[:] = self._processor([picture], return_tensors="np")["pixel_values"][0]
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
