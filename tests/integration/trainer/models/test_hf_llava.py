"""Family hf trains a whole LLaVA as family llava does: pixels, tokens, loss, gradients and features, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.hf.kinds import SQUARE
from tests.support.hf.published import config_of
from tests.support.hf.samples import SAMPLES, gradients_of, ids_of, inputs_of
from tests.support.trainer.native_models import picture
from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.data.chat.run_chat import make_chat
from vlmpipe.trainer.models.image_inputs import NamedImages
from vlmpipe.trainer.models.image_processor import image_preparer
from vlmpipe.trainer.models.registry import family_of

pytest_plugins = ("tests.support.hf.published",)

COUNTS = [len(sample) for sample in SAMPLES]


@pytest.mark.parametrize("freeze", [(), ("tower",)], ids=["trained", "frozen"])
def test_hf_trains_a_llava_as_family_llava_does(freeze: tuple[str, ...], published: Callable[[str], Path]) -> None:
    folder = published("llava")
    squares = {"size": SQUARE, "do_center_crop": False}
    ways = (whole_llava(folder, freeze), config_of(folder, freeze=freeze, image_processor=squares))
    (llava, ids, loss, gradients), (hf, same_ids, other_loss, other_gradients) = [computed(config) for config in ways]
    assert torch.equal(llava, hf) and ids == same_ids and loss == other_loss
    assert gradients.keys() == other_gradients.keys() and len(gradients) > 10
    assert all(torch.equal(gradient, other_gradients[name]) for name, gradient in gradients.items())


def whole_llava(folder: Path, freeze: tuple[str, ...]) -> ModelConfig:
    settings = {"image_size": SQUARE["height"], "feature_layer": -2, "feature_select": "drop_cls", "freeze": freeze}
    return ModelConfig.model_validate(
        {"pretrained": {"weights": str(folder)}, "tokenizer": str(folder), "family": "llava"} | settings
    )


def computed(config: ModelConfig) -> tuple[Tensor, list[list[int]], float, dict[str, Tensor]]:
    """Pixels, tokens of each sample, loss and gradients of one packed sequence."""
    family, chat = family_of(config), make_chat(config, DataConfig(source="x", sequence_length=8), ())
    ids = [ids_of(chat, config, [size for _, size in sample]) for sample in SAMPLES]
    images = image_preparer(config)([picture(*one) for sample in SAMPLES for one in sample], COUNTS).values
    model = family.build(config, chat.tokenizer)
    inputs: dict[str, Any] = inputs_of(ids) | {"images": images}
    loss = family.training_module(config, model, cached=False).train()(**inputs)
    loss.backward()
    return pixels_of(images), ids, float(loss.detach()), gradients_of(model)


def pixels_of(images: Tensor | NamedImages) -> Tensor:
    values = images if isinstance(images, Tensor) else images["pixel_values"]
    assert isinstance(values, Tensor)
    return values
