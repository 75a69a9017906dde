"""The llava family: packing, pretrained parts, rows without an image, and exports that plain transformers loads."""

from __future__ import annotations

import functools
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    AutoConfig,
    AutoModel,
    AutoProcessor,
    CLIPConfig,
    CLIPImageProcessorPil,
    CLIPModel,
    CLIPVisionConfig,
    Dinov2Config,
    Dinov2Model,
    LlavaForConditionalGeneration,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Model,
    SiglipVisionConfig,
    SiglipVisionModel,
)

from tests.support.trainer.runs import TINY
from vlmpipe.trainer.checkpoint.export.safetensors_writer import write_weights
from vlmpipe.trainer.checkpoint.export.settings_files import save_settings
from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.data.chat.encode import Chat
from vlmpipe.trainer.data.sample import Turn
from vlmpipe.trainer.data.tokenize import make_tokenizer
from vlmpipe.trainer.errors import ConfigError, ExitCode, UserError
from vlmpipe.trainer.evaluation.generate import generate_answers
from vlmpipe.trainer.models.base import Family
from vlmpipe.trainer.models.image_processor import PixelPreparer
from vlmpipe.trainer.models.image_tokens import image_tokens_of
from vlmpipe.trainer.models.packed_vlm import PackedInputs
from vlmpipe.trainer.models.registry import family_of

TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
DINOV2 = {"hidden_size": 32, "mlp_ratio": 2, "num_hidden_layers": 2, "num_attention_heads": 4}
LANGUAGE = {**TOWER, "num_key_value_heads": 2, "vocab_size": 300}


def config_of(**changes: Any) -> ModelConfig:
    return ModelConfig.model_validate(TINY["model"] | changes)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer("train:300", ["USER: what digit is this? ASSISTANT:", " 7"])


def picture(seed: int) -> bytes:
    buffer = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 255, (40, 48, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(buffer, format="PNG")
    return buffer.getvalue()


def sequence_loss(module: torch.nn.Module, samples: list[list[int]], labels_from: int, images: torch.Tensor) -> float:
    """Loss of one row that holds these samples one after another."""
    ids = torch.tensor([token for sample in samples for token in sample])
    positions = torch.cat([torch.arange(len(sample)) for sample in samples])
    index, start = [], 0
    for sample in samples:
        index += list(range(start + labels_from, start + len(sample) - 1))
        start += len(sample)
    label_index = torch.tensor(index)
    inputs = PackedInputs(
        input_ids=ids[None], position_ids=positions[None], label_index=label_index, label_ids=ids[label_index + 1],
        images=images,
    )  # fmt: skip
    return float(module(**inputs))


def answers(
    family: Family,
    model: torch.nn.Module,
    tokenizer: Any,
    prompts: list[list[int]],
    projected: Any,
    *,
    max_tokens: int,
) -> list[str]:
    inputs = functools.partial(family.generation_inputs, model, projected=projected)
    made = generate_answers(model, Chat(tokenizer), prompts, inputs, torch.device("cpu"), max_new_tokens=max_tokens)
    return [one.text for one in made.answers]


def test_packed_samples_do_not_see_each_other(tokenizer: PreTrainedTokenizerFast) -> None:
    family, config = family_of(config_of()), config_of()
    module = family.training_module(config, family.build(config, tokenizer), cached=False).eval()
    pixels = PixelPreparer(config)([picture(1), picture(2)])
    samples = [Chat(tokenizer).prompt(Turn(question, ""), [16]) for question in ("what digit is this?", "is it even?")]
    with torch.no_grad():
        together = sequence_loss(module, samples, 17, pixels)
        apart = sum(sequence_loss(module, [sample], 17, pixels[n : n + 1]) for n, sample in enumerate(samples))
    assert together == pytest.approx(apart, rel=1e-5)


def test_transformers_isolates_by_positions_only_without_a_mask_and_without_a_cache() -> None:
    """The trap that the training module avoids: were this test to fail, the library would have changed its rule."""
    torch.manual_seed(0)
    model = Qwen2Model(Qwen2Config(**LANGUAGE)).eval()
    ids, positions = torch.randint(0, 300, (1, 20)), torch.cat([torch.arange(12), torch.arange(8)])[None]
    with torch.no_grad():
        alone = model(ids[:, 12:], position_ids=positions[:, 12:], use_cache=False).last_hidden_state

        def difference(**arguments: Any) -> float:
            """Of the second sample's hidden states, packed against alone."""
            packed = model(ids, position_ids=positions, **arguments).last_hidden_state[:, 12:]
            return float((packed - alone).abs().max())

        assert difference(use_cache=False) < 1e-5
        assert difference(use_cache=True) > 1e-2
        assert difference(use_cache=False, attention_mask=torch.ones_like(ids)) > 1e-2


@pytest.mark.parametrize("frozen", [("tower",), ()])
def test_a_sequence_without_image_gives_every_trained_part_a_gradient(
    frozen: tuple[str, ...], tokenizer: PreTrainedTokenizerFast
) -> None:
    """A parameter without a gradient is a collective that one rank skips."""
    config = config_of(freeze=frozen)
    family = family_of(config)
    module = family.training_module(config, family.build(config, tokenizer), cached=False).train()
    ids = torch.tensor([Chat(tokenizer).prompt(Turn("is it even?", ""), [])])
    label_index = torch.arange(3)
    images = PixelPreparer(config)([])
    inputs = PackedInputs(
        input_ids=ids, position_ids=torch.arange(ids.shape[1])[None], label_index=label_index, label_ids=ids[0, 1:4],
        images=images,
    )  # fmt: skip
    module(**inputs).backward()
    projector = module.model.model.multi_modal_projector
    assert all(parameter.grad is not None for parameter in projector.parameters())
    tower = [parameter.grad is not None for parameter in module.model.model.vision_tower.encoder.parameters()]
    assert all(tower) if not frozen else not any(tower)


def test_random_weights_depend_on_the_seed_only(tokenizer: PreTrainedTokenizerFast) -> None:
    family = family_of(config_of())
    torch.manual_seed(99)
    first = family.build(config_of(), tokenizer).state_dict()
    second = family.build(config_of(), tokenizer).state_dict()
    other = family.build(config_of(seed=1), tokenizer).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def save_siglip(folder: Path) -> tuple[str, dict[str, torch.Tensor]]:
    torch.manual_seed(3)
    model = SiglipVisionModel(SiglipVisionConfig(**TOWER, patch_size=8, image_size=32))
    model.save_pretrained(folder)
    return "full", model.state_dict()


def save_clip(folder: Path) -> tuple[str, dict[str, torch.Tensor]]:
    """A dual encoder: the tower is its vision half."""
    torch.manual_seed(4)
    vision = CLIPVisionConfig(**TOWER, patch_size=8, image_size=32)
    text = {**TOWER, "vocab_size": 50, "max_position_embeddings": 8}
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision.to_dict(), projection_dim=16))
    model.save_pretrained(folder)
    return "drop_cls", model.vision_model.state_dict()


def save_dinov2(folder: Path) -> tuple[str, dict[str, torch.Tensor]]:
    """Published ones have a token for masked patches, which only their own training used."""
    torch.manual_seed(6)
    model = Dinov2Model(Dinov2Config(**DINOV2, patch_size=8, image_size=32))
    model.save_pretrained(folder)
    return "drop_cls", {name: value for name, value in model.state_dict().items() if "mask_token" not in name}


@pytest.mark.parametrize("save", [save_siglip, save_clip, save_dinov2])
def test_pretrained_parts_keep_their_weights(
    save: Callable[[Path], tuple[str, dict[str, torch.Tensor]]], tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    select, expected = save(tmp_path / "tower")
    torch.manual_seed(5)
    language = Qwen2ForCausalLM(Qwen2Config(**{**LANGUAGE, "vocab_size": 280}))
    language.save_pretrained(tmp_path / "language")
    config = config_of(
        tower={"weights": str(tmp_path / "tower")},
        language_model={"weights": str(tmp_path / "language")},
        feature_select=select,
        feature_layer=-2,
    )
    model = family_of(config).build(config, tokenizer)
    found = {name.removeprefix("vision_model."): t for name, t in model.model.vision_tower.state_dict().items()}
    wanted = {name.removeprefix("vision_model."): tensor for name, tensor in expected.items()}
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    embeddings = model.get_input_embeddings().weight
    assert len(embeddings) == len(tokenizer) > 280, "the tokenizer's own tokens get rows of their own"
    assert torch.equal(embeddings[:280], language.get_input_embeddings().weight)
    assert torch.equal(model.lm_head.weight[:280], language.lm_head.weight)


@pytest.mark.parametrize(
    ("kind", "layer"),
    [
        ("siglip_vision_model", -1),
        ("siglip_vision_model", 0),
        ("clip_vision_model", -1),
        ("clip_vision_model", -2),
        ("dinov2", -1),
        ("dinov2", 1),
    ],
)
def test_modules_behind_the_features_do_not_run(kind: str, layer: int) -> None:
    """Weights there that would spoil all numbers change no feature, in training and in the cache."""
    tower = {**(DINOV2 if kind == "dinov2" else TOWER), "model_type": kind, "patch_size": 8, "image_size": 32}
    config = config_of(tower={"config": tower}, image_size=32, feature_layer=layer)
    family, pixels = family_of(config), torch.randn(2, 3, 32, 32)
    used, plain = family.build_tower(config), AutoModel.from_config(AutoConfig.for_model(**tower)).eval()
    plain.load_state_dict(used.state_dict(), strict=kind != "dinov2")
    hidden = plain(pixels, output_hidden_states=True).hidden_states[layer].bfloat16()
    model = family.skeleton(config, vocabulary=300)
    model.model.vision_tower.load_state_dict(used.state_dict())
    in_training = family.training_module(config, model, cached=False).tower
    first = layer if layer >= 0 else TOWER["num_hidden_layers"] + 1 + layer
    unused = "|".join(map(str, range(first, TOWER["num_hidden_layers"]))) or "none"
    behind = re.compile(rf"^(.*\.)?(post_layernorm|layernorm|head|layers?\.({unused}))\.")
    for each in (used, in_training):
        for name, parameter in each.named_parameters():
            if behind.match(name):
                parameter.data.fill_(torch.nan)
        assert torch.equal(family.encode(config, each, pixels), hidden)


def test_a_pretrained_tower_keeps_its_normalisation(tmp_path: Path) -> None:
    save_clip(tmp_path)
    CLIPImageProcessorPil(image_mean=[0.1, 0.2, 0.3], image_std=[0.4, 0.5, 0.6]).save_pretrained(tmp_path)
    pixels = PixelPreparer(config_of(tower={"weights": str(tmp_path)}))([picture(1)])
    assert pixels.shape == (1, 3, 32, 32)
    stock = PixelPreparer(config_of())([picture(1)]) * 0.5 + 0.5  # back to 0..1
    expected = (stock - torch.tensor([0.1, 0.2, 0.3]).view(3, 1, 1)) / torch.tensor([0.4, 0.5, 0.6]).view(3, 1, 1)
    torch.testing.assert_close(pixels, expected, atol=0.02, rtol=0.02)


def test_weights_without_a_vision_tower_are_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    Qwen2ForCausalLM(Qwen2Config(**LANGUAGE)).save_pretrained(tmp_path / "text")
    config = config_of(tower={"weights": str(tmp_path / "text")})
    with pytest.raises(ConfigError, match="no vision tower"):
        family_of(config).build_tower(config)


def test_missing_weights_are_an_unavailable_dependency(tmp_path: Path) -> None:
    config = config_of(tower={"weights": str(tmp_path / "absent")})
    with pytest.raises(UserError, match="absent") as caught:
        image_tokens_of(config)(32, 32)
    assert caught.value.code == ExitCode.UNAVAILABLE


DINOV2_TOWER = {"config": {"model_type": "dinov2", **DINOV2, "patch_size": 8}}


@pytest.mark.parametrize(
    "changes",
    [*({"feature_layer": layer} for layer in (0, 1, -2)), {"tower": DINOV2_TOWER, "feature_select": "drop_cls"}],
    ids=str,
)
def test_an_export_gives_the_same_answers_in_plain_transformers(
    changes: dict[str, Any], tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    config = config_of(**changes)
    family = family_of(config)
    model = family.build(config, tokenizer).eval()
    write_weights(model, model.state_dict().__getitem__, tmp_path)
    save_settings(family, config, model, tokenizer, tmp_path)
    loaded = LlavaForConditionalGeneration.from_pretrained(tmp_path)
    processor = AutoProcessor.from_pretrained(tmp_path)
    asked = "what digit is this?"
    content = [{"type": "image"}, {"type": "text", "text": asked}]
    text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    image = Image.open(io.BytesIO(picture(1)))
    inputs = processor(images=image, text=text, return_tensors="pt", add_special_tokens=False)
    ours = Chat(tokenizer).prompt(Turn(f"<image>\n{asked}", ""), [16])
    assert inputs["input_ids"][0].tolist() == ours, "the chat template and the processor give the tokens of training"
    features = family.encode(config, family.tower(model), PixelPreparer(config)([picture(1)]))
    with torch.no_grad():
        logits = loaded(**inputs).logits
        pixels = PixelPreparer(config)([picture(1)])
        assert torch.equal(pixels, inputs["pixel_values"])
        expected = model(input_ids=torch.tensor([ours]), pixel_values=pixels).logits
        assert torch.equal(logits, expected)
        projected = family.project(model, features)
        answer = answers(family, model, tokenizer, [ours], projected, max_tokens=5)
        generated = loaded.generate(**inputs, max_new_tokens=5, do_sample=False)
    stock = tokenizer.decode(generated[0, len(ours) :], skip_special_tokens=True).strip()
    assert answer == [stock]


def test_answers_do_not_depend_on_the_batch(tokenizer: PreTrainedTokenizerFast) -> None:
    """Left padding must not leak into shorter prompts."""
    config = config_of()
    family = family_of(config)
    model = family.build(config, tokenizer).eval()
    questions = ["is it even?", "what digit is this? what digit is this?", Turn("is it 7?", "").question]
    prompts = [Chat(tokenizer).prompt(Turn(question, ""), [16]) for question in questions]
    pixels = PixelPreparer(config)([picture(seed) for seed in range(3)])
    features = family.project(model, family.encode(config, family.tower(model), pixels)).detach()
    together = answers(family, model, tokenizer, prompts, features, max_tokens=6)
    alone = [
        answers(family, model, tokenizer, [ids], features[n : n + 1], max_tokens=6)[0] for n, ids in enumerate(prompts)
    ]
    assert together == alone
