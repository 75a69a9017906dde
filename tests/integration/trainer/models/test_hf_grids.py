"""Family hf with max_pixels takes images as grids of patches: as its model's own processor and forward pass would."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoImageProcessor

from tests.support.hf.published import config_of
from tests.support.hf.samples import RELATIVE, SAMPLES, gradients_of, ids_of, inputs_of
from tests.support.short_form import chosen
from tests.support.trainer.native_models import picture
from vlmpipe.trainer.checkpoint.export.settings_files import save_settings
from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.config.model import GRID_TYPES, ModelConfig
from vlmpipe.trainer.data.chat.encode import Chat
from vlmpipe.trainer.data.chat.run_chat import make_chat
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.models.image_processor import image_preparer
from vlmpipe.trainer.models.image_tokens import image_form_of
from vlmpipe.trainer.models.registry import family_of

pytest_plugins = ("tests.support.hf.published",)

TYPES = chosen({name: name for name in GRID_TYPES}, lambda name: name == "qwen3_vl_moe")
SIZES = [[size for _, size in sample] for sample in SAMPLES]
PICTURES = [picture(*one) for sample in SAMPLES for one in sample]


def both_ways(folder: Path, **changes: Any) -> tuple[ModelConfig, ModelConfig]:
    """A model section whose images are grids, and one with the bounds of the published processor, which are the
    same."""
    plain = config_of(folder, **changes)
    size = image_form_of(plain).published.processor.image_processor.size  # type: ignore[union-attr]
    bounds = {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
    return config_of(folder, **bounds, **changes), plain


def chat_of(config: ModelConfig) -> Chat:
    return make_chat(config, DataConfig(source="x", sequence_length=8), ())


def grid_inputs(config: ModelConfig, chat: Chat, ids: list[list[int]]) -> dict[str, Any]:
    """With positions as the loader makes them."""
    grids = image_form_of(config).grids
    assert grids is not None
    positions = [
        grids.positions(np.isin(tokens, chat.vision_token_ids), sizes) for tokens, sizes in zip(ids, SIZES, strict=True)
    ]
    return inputs_of(ids) | {"position_ids": torch.from_numpy(np.concatenate(positions, axis=1))[:, None]}


@pytest.mark.parametrize("model_type", TYPES)
def test_grids_train_as_the_librarys_own_forward_pass(model_type: str, published: Callable[[str], Path]) -> None:
    """Tokens, loss and gradients of all parts; and of a frozen encoder on its features."""
    for freeze in ((), ("tower",)):
        config, plain = both_ways(published(model_type), freeze=freeze)
        family, chat = family_of(config), chat_of(config)
        assert family.require_trainable(config, pack=True, cached=True) == ""
        ids = [ids_of(chat, config, sizes) for sizes in SIZES]
        assert ids == [ids_of(chat_of(plain), plain, sizes) for sizes in SIZES]
        made = image_preparer(config)(PICTURES)
        given = grid_inputs(config, chat, ids) | {"images": made.values, "image_grids": made.grids}
        usual = inputs_of(ids) | {"images": image_preparer(plain)(PICTURES, list(map(len, SAMPLES))).values}
        found = [computed(config, chat, given), computed(plain, chat, usual)]
        if freeze:
            features = torch.cat(
                list(family.encode(config, family.build_tower(config), made.values, made.grids, torch.bfloat16))
            )
            given = {name: value for name, value in given.items() if name != "image_grids"} | {"images": features}
            found.append(computed(config, chat, given, cached=True))
        (loss, gradients), *others = found
        for other_loss, other_gradients in others:
            assert loss == pytest.approx(other_loss, rel=RELATIVE)
            largest = max(float(each.abs().max()) for each in other_gradients.values())
            assert gradients.keys() == other_gradients.keys()
            for name, gradient in other_gradients.items():
                torch.testing.assert_close(gradients[name], gradient, rtol=RELATIVE, atol=RELATIVE * largest, msg=name)


def computed(
    config: ModelConfig, chat: Chat, inputs: dict[str, Any], *, cached: bool = False
) -> tuple[float, dict[str, Tensor]]:
    family = family_of(config)
    model = family.build(config, chat.tokenizer)
    loss = family.training_module(config, model, cached=cached).train()(**inputs)
    loss.backward()
    return float(loss.detach()), gradients_of(model)


@pytest.mark.parametrize("model_type", TYPES)
def test_prompts_are_answered_as_by_the_library(model_type: str, published: Callable[[str], Path]) -> None:
    """Logits of prompts whose images were encoded apart, which `generate` gets in this form."""
    config, plain = both_ways(published(model_type), freeze=())
    family, chat = family_of(config), chat_of(config)
    model = family.build(config, chat.tokenizer).eval()
    ids = torch.tensor([ids_of(chat, config, SIZES[0])])
    made = image_preparer(config)(PICTURES[: len(SIZES[0])])
    with torch.no_grad():
        features = family.encode(config, family.tower(model), made.values, made.grids, torch.float32)
        projected = family.project(model, torch.cat(list(features)))
        given = family.generation_inputs(model, ids, projected, torch.tensor(made.grids))
        found = model(**given, attention_mask=torch.ones_like(ids)).logits
        published_images = image_form_of(plain).published
        assert published_images is not None
        named = {"pixel_values": made.values, "image_grid_thw": torch.tensor(made.grids)}
        expected = model(
            input_ids=ids, attention_mask=torch.ones_like(ids), **published_images.types(ids), **named
        ).logits
    torch.testing.assert_close(found, expected, rtol=RELATIVE, atol=RELATIVE * float(expected.abs().max()))


@pytest.mark.parametrize("family", ["qwen2_5_vl", "hf"])
def test_exports_hold_the_runs_bounds_of_pixels(family: str, published: Callable[[str], Path], tmp_path: Path) -> None:
    """Published Qwen2-VL and Qwen2.5-VL name theirs min_pixels and max_pixels, which go before a size."""
    bounds, size = {"min_pixels": 256, "max_pixels": 1024}, {"shortest_edge": 256, "longest_edge": 1024}
    source = copied(published("qwen2_5_vl"), tmp_path / "source")
    config = config_of(source, family=family, **bounds)
    tokenizer = chat_of(config).tokenizer
    save_settings(family_of(config), config, family_of(config).build(config, tokenizer), tokenizer, tmp_path)
    served = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    assert {name: served.size[name] for name in size} == size
    made = image_preparer(config)(PICTURES)
    opened = [Image.open(io.BytesIO(one)).convert("RGB") for one in PICTURES]
    assert served(opened)["image_grid_thw"].tolist() == [list(grid) for grid in made.grids]

    plain = config_of(source, image_processor={"size": size})
    images = image_form_of(plain).published
    assert images is not None and images.processor.image_processor.size["longest_edge"] == bounds["max_pixels"]


def copied(folder: Path, source: Path) -> Path:
    """The model as it would be published with transformers 4: bounds by their own names, and no file of a processor."""
    shutil.copytree(folder, source)
    (source / "processor_config.json").unlink()
    file = source / "preprocessor_config.json"
    settings = json.loads(file.read_text())
    del settings["size"]
    file.write_text(json.dumps(settings | {"min_pixels": 64, "max_pixels": 1 << 24}))
    return source


def test_a_type_whose_images_are_no_grids_is_refused(published: Callable[[str], Path]) -> None:
    config = config_of(published("internvl"), max_pixels=4096)
    with pytest.raises(ConfigError, match=r"model\.max_pixels is set, and model\.pretrained is a internvl model"):
        image_form_of(config)
