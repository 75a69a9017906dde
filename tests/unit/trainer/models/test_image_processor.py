"""Pixel values: to the bit what the family's image processor makes of a picture."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.support.data.prepared import encode, picture
from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.models.image_processor import PixelPreparer


def config(model_type: str) -> ModelConfig:
    parts: dict[str, Any] = {"tower": {"config": {"model_type": model_type}}, "language_model": {"weights": "none"}}
    return ModelConfig(**parts, tokenizer="train:300", image_size=32)


PICTURES = {
    "larger": encode(picture(1, side=90), "JPEG"),
    "smaller": encode(picture(2, side=11)),
    "oblong": encode(picture(3, side=64).resize((70, 21)), "JPEG"),
    "grey": encode(picture(4, mode="L")),
    "palette": encode(picture(5).convert("P")),
    "of that size": encode(picture(6, side=32)),
}


@pytest.mark.parametrize("model_type", ["siglip_vision_model", "clip_vision_model"])
def test_pixels_are_those_of_the_image_processor(model_type: str) -> None:
    prepare = PixelPreparer(config(model_type))
    assert prepare._tables is not None
    opened = [Image.open(io.BytesIO(data)).convert("RGB") for data in PICTURES.values()]
    expected = prepare._processor(opened, return_tensors="pt")["pixel_values"]
    assert torch.equal(prepare(list(PICTURES.values())), expected)
    assert prepare([]).shape == (0, 3, 32, 32)


def test_a_processor_with_other_steps_runs_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    class Processor:
        def __call__(self, images: list[Image.Image], return_tensors: str) -> dict[str, Any]:
            return {"pixel_values": np.stack([np.full((3, 32, 32), image.width, np.float32) for image in images])}

    family = type("Family", (), {"image_processor": lambda self, config: Processor()})()
    monkeypatch.setattr("vlmpipe.trainer.models.image_processor.family_of", lambda config: family)
    made = PixelPreparer(config("siglip_vision_model"))([PICTURES["smaller"], PICTURES["oblong"]])
    assert made[:, 0, 0, 0].tolist() == [11, 70]
