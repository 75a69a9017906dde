"""Images that are cut into tiles, by family `smolvlm`: tokens and pixels are the published processor's."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import PreTrainedTokenizerFast, SmolVLMImageProcessorPil
from transformers.models.smolvlm import processing_smolvlm

from tests.support.hf.publish import publish
from tests.support.pipelines.run_files import small
from tests.support.short_form import WHOLE
from tests.support.trainer.native_models import picture
from tests.support.trainer.tiny_native import model_section
from vlmpipe.pipelines.check import check_run
from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.config.model import IMAGE_TOKEN, ModelConfig
from vlmpipe.trainer.data.chat.encode import Chat
from vlmpipe.trainer.data.chat.run_chat import make_chat
from vlmpipe.trainer.data.sample import Turn
from vlmpipe.trainer.data.tokenize import CONTROL_TOKEN, make_tokenizer
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.evaluation.validation.shuffled_images import ShuffledImages
from vlmpipe.trainer.models.attention.cu_seqlens import CuSeqlens
from vlmpipe.trainer.models.hf.processor import PublishedImages, published_images
from vlmpipe.trainer.models.image_inputs import Images
from vlmpipe.trainer.models.image_processor import image_preparer
from vlmpipe.trainer.models.image_tokens import ImageForm, image_form_of, image_tokens_of, sample_image_tokens
from vlmpipe.trainer.models.registry import family_of
from vlmpipe.trainer.sizing.image_tiles import control_tokens

SIDE, EDGE, TILE_TOKENS = 16, 48, 4
TEXTS = ["USER: what is this? ASSISTANT:", " 7"]
SIZES = [(20, 20), (40, 16), (16, 40), (300, 7), (7, 300), (48, 48), (49, 47), (1, 1), (130, 90)]
ASKED = ["what is this?", "and this:", " is it\n", "same?\n\n"]


def config_of(**changes: Any) -> ModelConfig:
    return ModelConfig.model_validate(model_section("smolvlm", longest_edge=EDGE) | changes)


def images_of(config: ModelConfig) -> PublishedImages:
    published = image_form_of(config).published
    assert published is not None
    return published


def tokenizer_of(form: ImageForm) -> PreTrainedTokenizerFast:
    return make_tokenizer("train:400", TEXTS, form)


def pixels_of(made: Images) -> torch.Tensor:
    assert not isinstance(made.values, torch.Tensor)
    pixels = made.values["pixel_values"]
    assert isinstance(pixels, torch.Tensor)
    return pixels[0]


@settings(max_examples=60 if WHOLE else 15, deadline=None)
@given(width=st.integers(1, 400), height=st.integers(1, 400), times=st.integers(2, 7))
def test_a_tokenizer_is_asked_for_the_control_tokens_of_images_of_all_sizes(
    width: int, height: int, times: int
) -> None:
    config = config_of(longest_edge=SIDE * times)
    try:
        (written,) = images_of(config).texts(((width, height),))
    except ValueError:  # of a strip the processor leaves no pixel
        assert max(width, height) / min(width, height) >= times * SIDE
        return
    assert {*CONTROL_TOKEN.findall(written.text)} <= {IMAGE_TOKEN, *control_tokens(SIDE, SIDE * times)}
    assert {*written.runs} == {TILE_TOKENS}


@pytest.mark.parametrize("edge", [None, EDGE])
@pytest.mark.parametrize("sizes", [[size] for size in SIZES] + [SIZES[:3], SIZES[3:6], SIZES[6:]], ids=str)
def test_tokens_and_pixels_are_those_of_the_published_processor(
    sizes: list[tuple[int, int]], edge: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the tokenizer of the run, which the processor that training uses does not have."""
    config = config_of(longest_edge=edge)
    form, count = image_form_of(config), sample_image_tokens(config)
    tokenizer = tokenizer_of(form)
    cut = {"size": {"longest_edge": EDGE}} if edge else {"do_image_splitting": False, "do_resize": False}
    kept = SmolVLMImageProcessorPil(max_image_size={"longest_edge": SIDE}, **cut)
    kind = processing_smolvlm.SmolVLMProcessor
    monkeypatch.setattr(processing_smolvlm, "num2words", str)
    monkeypatch.setattr(kind, "check_argument_for_proper_class", lambda self, name, value: type(value))
    published = kind(kept, tokenizer, None, image_seq_len=TILE_TOKENS)
    question = "".join(f"{IMAGE_TOKEN}{ASKED[number % len(ASKED)]}" for number in range(len(sizes)))
    data = [picture(seed, size) for seed, size in enumerate(sizes)]
    opened = [Image.open(io.BytesIO(one)).convert("RGB") for one in data]
    expected = published(
        images=[opened], text=[f"<s>USER: {question} ASSISTANT:"], add_special_tokens=False, return_tensors="pt"
    )
    counts = count(sizes)
    whole = Chat(tokenizer, form).encode([Turn(question, "yes")], counts, sizes).input_ids
    assert whole[: expected["input_ids"].shape[1]] == expected["input_ids"][0].tolist()
    assert torch.equal(pixels_of(image_preparer(config)(data, [len(data)])), expected["pixel_values"][0])


@pytest.mark.parametrize("family", ["smolvlm", "hf"])
def test_texts_and_tensors_of_many_sizes_are_found_without_preparing_each(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Photographs have thousands of sizes, and preparing one of them takes half a second."""
    folder = str(publish("smolvlm", tmp_path))
    edges = {"size": {"longest_edge": EDGE}, "max_image_size": {"longest_edge": SIDE}}
    config = config_of(pretrained={"weights": folder}, tokenizer=folder)
    if family == "hf":
        config = ModelConfig(family="hf", image_processor=edges, pretrained={"weights": folder}, tokenizer=folder)
    images = images_of(config)
    expected = {size: images._processed([Image.new("RGB", size)], images.processor) for size in SIZES}
    layouts = [images.layout(size) for size in SIZES]
    monkeypatch.setattr(Image.Image, "resize", None)
    for (width, height), (tensors, texts) in expected.items():
        for size in ((width, height), (2 * width, 2 * height)):
            (written,) = images.texts((size,))
            assert written.text.replace(IMAGE_TOKEN, TILE_TOKENS * IMAGE_TOKEN) == texts[0]
            layout = images.layout(size)
            assert any(layout["pixel_values"] is one["pixel_values"] for one in layouts)
            assert layout["pixel_values"].shape == tensors["pixel_values"].shape
            assert torch.equal(layout["pixel_attention_mask"], tensors["pixel_attention_mask"])
            assert layout["pixel_attention_mask"].nbytes == tensors["pixel_values"][:, :, 0].numel()


@pytest.mark.parametrize("side", [8, 16])
def test_tiles_have_the_tokens_of_their_side_whatever_the_published_files_say(side: int, tmp_path: Path) -> None:
    folder = publish("smolvlm", tmp_path)
    assert json.loads((folder / "processor_config.json").read_text())["image_seq_len"] == TILE_TOKENS
    source = {"pretrained": {"weights": str(folder)}, "tokenizer": str(folder)}
    for config in (
        config_of(image_size=side, longest_edge=None),
        config_of(**source, image_size=side, longest_edge=2 * side),
    ):
        tiles = 1 if config.longest_edge is None else 5
        assert image_tokens_of(config)(40, 40) == tiles * (side // 8) ** 2
        assert pixels_of(image_preparer(config)([picture(0, (40, 40))])).shape == (tiles, 3, side, side)


@pytest.mark.parametrize("side", [12, 24])
def test_an_impossible_image_size_is_refused_with_a_message(side: int) -> None:
    with pytest.raises(ConfigError, match=rf"tiles of {side} pixels do not fit this model") as caught:
        images_of(config_of(image_size=side, longest_edge=None))
    assert "a multiple of 8 (patch_size x scale_factor), at most 16" in str(caught.value.expected)


def test_a_processor_is_made_without_the_package_that_spells_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processing_smolvlm, "num2words", None)
    folder = publish("smolvlm", tmp_path)
    monkeypatch.setattr(processing_smolvlm, "num2words", None)
    config = config_of(pretrained={"weights": str(folder)}, tokenizer=str(folder))
    assert published_images(config.tower, config.image_settings).image_token == IMAGE_TOKEN


def test_a_tokenizer_without_a_place_of_a_tile_is_refused(tmp_path: Path) -> None:
    fewer, more = (ImageForm(is_in_tokenizer=True, control_tokens=control_tokens(16, edge)) for edge in (32, 64))
    tokenizer_of(fewer).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"lacks <row_1_col_3>, <row_1_col_4>, <row_2_col_3>, .* and 8 more"):
        make_tokenizer(str(tmp_path), [], more)
    make_tokenizer(str(tmp_path), [], fewer)


@pytest.mark.parametrize(("sequence_length", "state"), [(256, "ok"), (30, "failed")])
def test_check_says_whether_images_fit_into_a_sequence(sequence_length: int, state: str) -> None:
    config = small(model=model_section("smolvlm", longest_edge=EDGE), data__sequence_length=sequence_length)
    found = [check for check in check_run(config) if check.subject == "image tokens"]
    assert [check.state for check in found] == [state]
    assert "40 to 40 per image by its size" in found[0].text


def test_another_samples_image_is_cut_as_the_questions_own() -> None:
    """Else the text would say of two rows of three tiles that they are three rows of two."""
    sizes = [(60, 40), (66, 44), (40, 60), (44, 66)]

    class Split:
        def __len__(self) -> int:
            return len(sizes)

        def image_token_counts(self, number: int) -> list[int]:
            return [28]

        def image_sizes(self, number: int) -> list[tuple[int, int]]:
            return [sizes[number]]

        def image_sha256(self, number: int) -> list[str]:
            return [str(number)]

    form = image_form_of(config_of())
    tiled, whole = (ShuffledImages(Split(), None, one) for one in (form, ImageForm()))  # type: ignore[arg-type]
    assert [tiled.partner(number) for number in range(4)] == [1, 0, 3, 2]
    assert [whole.partner(number) for number in (0, 1)] == [2, 3]


def loss_and_gradients(config: ModelConfig) -> tuple[float, dict[str, torch.Tensor]]:
    """Of a sample with two images, with all parts trained."""
    family, chat = family_of(config), make_chat(config, DataConfig(source="x", sequence_length=8), ())
    turn = Turn(f"{IMAGE_TOKEN}{IMAGE_TOKEN}seven?", "it is seven")
    ids = chat.encode([turn], sample_image_tokens(config)(SIZES[:2]), SIZES[:2]).input_ids
    module = family.training_module(config, family.build(config, chat.tokenizer), cached=False).train()
    made = image_preparer(config)([picture(number, size) for number, size in enumerate(SIZES[:2])], [2])
    loss = module(
        input_ids=torch.tensor(ids)[None],
        position_ids=torch.arange(len(ids))[None],
        label_index=torch.arange(len(ids) - 1),
        label_ids=torch.tensor(ids[1:]),
        samples=CuSeqlens.of([[len(ids)]], len(ids)),
        images=made.values,
    )
    loss.backward()
    return float(loss.detach()), {name: one.grad for name, one in module.named_parameters() if one.grad is not None}


def test_the_name_and_family_hf_are_equal_to_the_bit(tmp_path: Path) -> None:
    folder = str(publish("smolvlm", tmp_path))
    source = {"pretrained": {"weights": folder}, "tokenizer": folder, "freeze": ()}
    edges = {"size": {"longest_edge": EDGE}, "max_image_size": {"longest_edge": SIDE}}
    by_name, by_type = (
        loss_and_gradients(config)
        for config in (config_of(**source), ModelConfig(family="hf", image_processor=edges, **source))
    )
    assert by_name[0] == by_type[0] and by_name[1].keys() == by_type[1].keys()
    assert all(torch.equal(gradient, by_type[1][name]) for name, gradient in by_name[1].items())


def test_the_drawn_vision_encoder_is_that_of_the_model_whatever_else_is_drawn() -> None:
    config = config_of()
    family, tokenizer = family_of(config), tokenizer_of(image_form_of(config))
    alone, whole = family.build_tower(config), family.tower(family.build(config, tokenizer))
    expected = whole.state_dict()
    assert alone.state_dict().keys() == expected.keys()
    assert all(torch.equal(weight, expected[name]) for name, weight in alone.state_dict().items())
    (features,) = family.encode(config, alone, image_preparer(config)([picture(0, (40, 16))], [1]).values)
    assert (features.shape[1:], features.dtype) == (family.feature_shape(config), torch.bfloat16)
