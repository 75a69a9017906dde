"""Processors of published models, without the parts that this machine has no packages for."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import PixtralImageProcessorPil

from tests.support.hf.kinds import INSTALLED, TEXT, VISION
from tests.support.hf.publish import model_section, publish, tokenizer_of
from tests.support.short_form import chosen
from tests.support.trainer.native_models import picture
from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.config.weights.origin import WeightsConfig
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.models import image_threads
from vlmpipe.trainer.models.hf import processor
from vlmpipe.trainer.models.hf.processor import (
    ImageText,
    PublishedImages,
    _in_runs,
    join,
    published_images,
    torchvision_release,
)
from vlmpipe.trainer.models.image_processor import published_inputs

SAMPLES = {1: ((16, 16),), 10: ((64, 16), (16, 64)), 20: ((48, 32),), 30: ((32, 48), (64, 64), (16, 32))}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<a><t><t><b>", ImageText("<a><image><b>", (2,))),
        ("<t><t>\n<t>", ImageText("<image>\n<image>", (2, 1))),
        ("none", ImageText("none", ())),
    ],
)
def test_runs_of_image_tokens_become_one_mark_each(text: str, expected: ImageText) -> None:
    assert _in_runs(text, "<t>") == expected


def test_samples_are_joined_along_images_and_padded_elsewhere() -> None:
    one, two = torch.ones(1, 3, 4, 4), torch.ones(2, 3, 2, 6)
    joined = join([{"pixel_values": one}, {"pixel_values": two, "image_sizes": torch.ones(2, 2)}])
    assert joined["pixel_values"].shape == (3, 3, 4, 6) and joined["image_sizes"].shape == (2, 2)
    assert torch.equal(joined["pixel_values"][1:, :, :2], two) and not joined["pixel_values"][1:, :, 2:].any()
    nested = torch.ones(1, 2, 3, 4, 4)  # (sample, images, ...)
    assert join([{"pixel_values": nested, "pixel_attention_mask": nested[:, :, 0]}] * 2)["pixel_values"].shape[1] == 4
    assert join([]) == {}


def test_a_processor_that_needs_torchvision_is_refused_in_words(tmp_path: Path) -> None:
    content = {"model_type": "mistral3", "text_config": TEXT | {"model_type": "mistral"}, "image_token_id": 5}
    (tmp_path / "config.json").write_text(json.dumps(content | {"vision_config": VISION | {"model_type": "pixtral"}}))
    tokenizer_of("llava").save_pretrained(tmp_path)
    PixtralImageProcessorPil().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"needs torchvision, which is not installed") as raised:
        published_images(WeightsConfig(weights=str(tmp_path)), None)
    assert raised.value.fix == torchvision_release()


@pytest.mark.parametrize(
    ("installed", "line"),
    [
        ("2.13.0", "pip install torchvision==0.28.0"),
        ("2.13.0+cpu", "pip install torchvision==0.28.0+cpu from the index that torch 2.13.0+cpu came from; PyPI"),
        ("2.14.1+cu126", "pip install torchvision==0.29.1+cu126 from the index"),
    ],
)
def test_the_release_of_torchvision_is_that_of_the_installed_torch(
    installed: str, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", installed)
    assert torchvision_release().startswith(line)


def test_whatever_a_processor_raises_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its code is that of any model type."""
    part, plain = WeightsConfig(weights=str(publish("internvl", tmp_path))), PublishedImages._processed
    lacking = ValueError("LayoutProcessor requires the num2words library but it was not found")
    raised = (
        KeyError("frames"),
        NotImplementedError(),
        IndexError("list index out of range"),
        ImportError("x"),
        lacking,
    )
    for error in raised:
        monkeypatch.setattr(PublishedImages, "_processed", lambda *_, error=error: (_ for _ in ()).throw(error))
        processor._published.cache_clear()
        with pytest.raises(ConfigError, match=r"processor of \S+") as refused:
            published_images(part, None)
        assert (refused.value.fix == "pip install num2words") == (error is lacking)
    monkeypatch.setattr(PublishedImages, "_processed", plain)
    processor._published.cache_clear()


def test_a_model_that_takes_no_images_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TEXT | {"model_type": "llama"}))
    with pytest.raises(ConfigError, match=r"no processor|no image-text model"):
        published_images(WeightsConfig(weights=str(tmp_path)), None)


def of_published(name: str) -> bool:
    return name in ("internvl", "llava_next", "qwen2_5_vl")


@pytest.mark.parametrize("model_type", chosen(INSTALLED, of_published))
def test_threads_make_the_bits_of_one(model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples of several images and sizes, three times each, so that threads meet."""
    images = published_images(WeightsConfig(weights=str(publish(model_type, tmp_path))), None)
    samples = [[picture(seed + place, size) for place, size in enumerate(sizes)] for seed, sizes in SAMPLES.items()] * 3
    flat, counts = [one for sample in samples for one in sample], [len(sample) for sample in samples]
    made = list[dict[str, torch.Tensor]]()
    for threads in (1, 4):
        monkeypatch.setattr(image_threads, "num_threads", lambda threads=threads: threads)
        image_threads._pool.cache_clear()
        made.append(published_inputs(images, flat, counts).values)
    image_threads._pool.cache_clear()
    one, several = made
    assert one.keys() == several.keys() and "pixel_values" in one
    assert all(torch.equal(one[name], several[name]) for name in one)


def test_several_threads_work_at_once_and_each_has_a_processor_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = published_images(WeightsConfig(weights=str(publish("internvl", tmp_path))), None)
    monkeypatch.setattr(image_threads, "num_threads", lambda: 2)
    image_threads._pool.cache_clear()
    together, seen, tensors = threading.Barrier(2), list[object](), images.tensors

    def met(pictures: Sequence[Image.Image]) -> dict[str, torch.Tensor]:
        together.wait(20)
        seen.append(images._own_copy(images.processor).image_processor)
        return tensors(pictures)

    monkeypatch.setattr(images, "tensors", met)
    published_inputs(images, [picture(1, (16, 16)), picture(2, (16, 16))])
    image_threads._pool.cache_clear()
    assert len({id(one) for one in seen}) == 2


def test_settings_of_the_image_processor_can_be_changed(tmp_path: Path) -> None:
    folder = publish("internvl", tmp_path)
    counts = {}
    for most in (1, 2):
        section = ModelConfig.model_validate(model_section(folder, image_processor={"max_patches": most}))
        counts[most] = published_images(section.tower, section.image_processor).texts(((64, 16),))[0].runs
    assert counts == {1: (4,), 2: (12,)}, "two patches come with one of the whole image"


def test_a_template_may_write_another_token_for_an_image_than_features_replace(tmp_path: Path) -> None:
    """Qianfan-OCR's does."""
    images = published_images(WeightsConfig(weights=str(publish("qianfan_ocr", tmp_path))), None)
    assert (images.placeholder, images.image_token) == ("<image>", "<IMG_CONTEXT>")
    (written,) = images.texts(((16, 16),))
    assert written == ImageText("<img><image></img>", (4,))
