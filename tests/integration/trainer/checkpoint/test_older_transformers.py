"""transformers 4.57 opens exports: it finds every weight and computes the same (`make recipe-old-transformers`).

It runs in a process of its own, without any of vlmpipe, on inputs that 5 has made: its processors of some types need
torchvision.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoTokenizer

from tests.support.drivers.older_transformers import INPUTS, LOGITS
from tests.support.hf.kinds import INSTALLED, KINDS
from tests.support.hf.publish import model_section, publish, tokenizer_of
from tests.support.hf.published_names import TABLE, in_other_transformers, saved_by
from tests.support.paths import ROOT
from tests.support.trainer import tiny_native
from tests.support.trainer.tiny_runs import TINY
from vlmpipe.trainer.checkpoint.export.safetensors_writer import write_weights
from vlmpipe.trainer.checkpoint.export.settings_files import save_settings
from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.data.tokenize import make_tokenizer
from vlmpipe.trainer.models.hf_native.peft_folder import write_adapter
from vlmpipe.trainer.models.image_tokens import image_form_of, image_tokens_of
from vlmpipe.trainer.models.registry import family_of

OLDER = ROOT / "build/recipes/transformers-457"
PUBLISHED: dict[str, Any] = json.loads(TABLE.read_text())
MOST_DIFFERENCE = 1e-4  # of the largest logit, in fp32
# Since 4.55.1 their vision encoders place patches one row and column off (transformers issue 41190), in 4.57 too.
OTHER_POSITIONS = ("idefics3", "smolvlm")
EXPERTS_BY_NAME = "glm4v_moe"  # whose layers PEFT takes for experts, so that targets are named
UNADAPTED_ENCODER = "internvl"  # model.lora finds no layers to adapt in it
REFUSED = "paligemma"  # in training, since its texts are not causal
KNOWN = [name for name, entry in PUBLISHED.items() if entry["saved_by"] and name in INSTALLED and name != REFUSED]
NATIVE: dict[str, dict[str, Any]] = {
    "llava_siglip": {"family": "llava"} | TINY["model"],  # the quickstart's form: random weights, a trained tokenizer
    "smolvlm": tiny_native.model_section("smolvlm"),
}
needs_older = pytest.mark.skipif(not OLDER.is_dir(), reason="make recipe-old-transformers makes its environment")
QUESTION, SIZE, SPECIALS = [7, 11, 12], (32, 24), ("vision_start_token_id", "vision_end_token_id", "video_token_id")


def export(model_type: str, root: Path) -> Path:
    """An export of a published model, with inputs and logits of this release beside it."""
    base = publish(model_type, root / "base" / model_type)
    settings, tokenizer = json.loads((base / "config.json").read_text()), AutoTokenizer.from_pretrained(base)
    around = KINDS[model_type].around
    if around[0].startswith("<|vision"):  # 4.57 finds images by these tokens
        settings |= dict(zip(SPECIALS, tokenizer.convert_tokens_to_ids([*around, "<|video_pad|>"]), strict=True))
        (base / "config.json").write_text(json.dumps(settings))
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": [2], "repetition_penalty": 1.05}))
    config = ModelConfig.model_validate(model_section(base))
    family, folder = family_of(config), root / model_type
    folder.mkdir()
    model = family.blueprint(config, tokenizer)
    write_weights(model, family.initial_weights(config, tokenizer).read, folder)
    save_settings(family, config, model, tokenizer, folder)
    inputs = question(family.images(config), tokenizer, around, with_image=model_type not in OTHER_POSITIONS)
    keep(folder, inputs)
    return folder


def native_export(name: str, root: Path) -> Path:
    """The same of a model that starts from random weights."""
    config = ModelConfig.model_validate(NATIVE[name])
    tokenizer = make_tokenizer("train:300", ["USER: what digit is this? ASSISTANT:", " 7"], image_form_of(config))
    family, folder = family_of(config), root / name
    folder.mkdir()
    model = family.build(config, tokenizer)
    write_weights(model, model.state_dict().__getitem__, folder)
    save_settings(family, config, model, tokenizer, folder)
    tokens, inputs = list(QUESTION), {}
    if name not in OTHER_POSITIONS:
        tokens += [int(model.config.image_token_id)] * image_tokens_of(config)(*SIZE)
        inputs["pixel_values"] = torch.rand(1, 3, config.image_size, config.image_size)
    keep(folder, {"input_ids": torch.tensor([[*tokens, *QUESTION]]), **inputs})
    return folder


def keep(folder: Path, inputs: dict[str, torch.Tensor]) -> None:
    whole = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        torch.save(whole(**inputs).logits, folder / LOGITS)
    torch.save(inputs, folder / INPUTS)


def question(images: Any, tokenizer: Any, around: tuple[str, str], *, with_image: bool) -> dict[str, torch.Tensor]:
    picture = Image.effect_noise(SIZE, 80).convert("RGB")
    tokens = list(QUESTION)
    if with_image:
        (text,) = images.texts((SIZE,))
        runs = iter(text.runs)
        written = text.text.replace("<image>", images.image_token)
        ids = tokenizer("".join((around[0], written, around[1])), add_special_tokens=False)["input_ids"]
        tokens += [one for token in ids for one in [token] * (next(runs) if token == images.image_token_id else 1)]
    input_ids = torch.tensor([[*tokens, *QUESTION]])
    own = images.tensors([picture]) if with_image else {}
    return {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids), **own, **images.types(input_ids)}


@pytest.mark.slow
@needs_older
def test_it_finds_every_weight_and_computes_the_same(tmp_path: Path) -> None:
    folders = [export(name, tmp_path) for name in KNOWN] + [native_export(name, tmp_path) for name in NATIVE]
    found = in_other_transformers(OLDER, "read", folders)
    print(json.dumps(found, indent=1))
    for name, result in found.items():
        assert "refused" not in result, (name, result)
        assert not result["missing_keys"] and not result["unexpected_keys"] and not result["mismatched_keys"], name
        assert result["difference"] <= MOST_DIFFERENCE, (name, result["difference"])
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / name)
        assert result["tokens"] == tokenizer(result["prompt"])["input_ids"] and result["prompt"], name
        assert result["generation"]["repetition_penalty"] == (1.0 if name in NATIVE else 1.05)
        lacks_torchvision = "Torchvision" in result["processor"] or name == "smolvlm"
        assert lacks_torchvision or result["processor"].endswith("Processor"), (name, result["processor"])
    assert len(found) >= 18


def adapter_export(model_type: str, root: Path) -> Path:
    """An adapter of language model and vision encoder on an export, with inputs and logits of this release."""
    base, tokenizer, folder = export(model_type, root), tokenizer_of(model_type), root / f"{model_type}-adapter"
    parts = ["language_model", *(["tower"] if model_type != UNADAPTED_ENCODER else [])]
    lora: dict[str, Any] = {"rank": 2, "export": "adapter", "parts": parts}
    targets = {"targets": ["q_proj", "k_proj", "v_proj", "o_proj"]} if model_type == EXPERTS_BY_NAME else {}
    section = model_section(base, freeze=["projector"], lora=lora | targets)
    config = ModelConfig.model_validate(section)
    family = family_of(config)
    model = family.build(config, tokenizer)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn_like(parameter)
    write_adapter(model, config, model.state_dict().__getitem__, folder)
    save_settings(family, config, model, tokenizer, folder)
    inputs = torch.load(base / INPUTS)
    with torch.no_grad():
        torch.save(family.load(folder).eval()(**inputs).logits, folder / LOGITS)
    torch.save(inputs, folder / INPUTS)
    return folder


@pytest.mark.slow
@needs_older
def test_peft_applies_adapters_there_as_here(tmp_path: Path) -> None:
    """Also in vision encoders, whose modules have other names there: PEFT passes over names that it does not find."""
    folders = [adapter_export(name, tmp_path) for name in KNOWN if name not in OTHER_POSITIONS]
    found = in_other_transformers(OLDER, "adapters", folders)
    for name, result in found.items():
        assert "refused" not in result, (name, result)
        assert result["difference"] <= MOST_DIFFERENCE < 100 * MOST_DIFFERENCE < result["without"], (name, result)
    assert len(found) >= 14


@pytest.mark.slow
@needs_older
def test_the_table_of_published_names_is_what_it_saves() -> None:
    saved = saved_by(OLDER)
    assert saved == {name: entry["tensors"] for name, entry in PUBLISHED.items() if entry["saved_by"]}
