"""Exports have the tensors of published models: names, shapes and values that another program finds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForImageTextToText

from tests.support.hf.kinds import INSTALLED
from tests.support.hf.publish import model_section, publish, tokenizer_of
from tests.support.hf.published_names import MODELS, TABLE, blueprint, config_named, exported_names, names_of, shapes
from tests.support.short_form import chosen
from tests.support.trainer import tiny_native
from tests.support.trainer.tiny_runs import TINY, merged
from vlmpipe.trainer.checkpoint.export.published_form import published_form, stored_tensors
from vlmpipe.trainer.checkpoint.export.safetensors_writer import write_weights
from vlmpipe.trainer.checkpoint.export.settings_files import save_settings
from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.data.tokenize import make_tokenizer
from vlmpipe.trainer.models.image_tokens import image_form_of
from vlmpipe.trainer.models.layers.lora import without_adapters
from vlmpipe.trainer.models.registry import family_of
from vlmpipe.trainer.weights_digest import weights_sha256

PUBLISHED = json.loads(TABLE.read_text())
# One of each: renamed, with another prefix in the tower, split, merged, transposed, cut into unequal parts.
FORMS = ("llava", "gemma3", "glm4v_moe", "qianfan_ocr", "qwen3_vl_moe", "molmo2")

# Native families from random weights: parts that are put together, and whole models.
LLAMA = {"model.language_model.config.model_type": "llama"}
NATIVE: dict[str, dict[str, Any]] = {
    "llava_siglip": {"family": "llava"} | dict(merged(TINY, LLAMA)["model"]),
    **{family: tiny_native.model_section(family) for family in ("smolvlm", "qwen2_5_vl", "qwen3_vl")},
}
# Published names that these tiny models lack: their encoder pools nothing, their head is the embedding.
LACKED = {"llava_siglip": "vision_tower.vision_model.head.", "qwen3_vl": "lm_head."}
TRAINED: dict[str, dict[str, Any]] = {
    "all": {},
    "adapters": {"freeze": [], "lora": {"rank": 2, "parts": ["language_model", "projector", "tower"]}},
    "adapters of 4 bits": {"freeze": ["tower"], "lora": {"rank": 2, "quantize_base": "nf4"}},
}


def test_every_type_has_published_names() -> None:
    assert PUBLISHED.keys() == set(MODELS)
    assert sum(bool(entry["saved_by"]) for entry in PUBLISHED.values()) >= 19


@pytest.mark.parametrize("name", chosen({name: name for name in MODELS}, lambda name: name in FORMS))
def test_an_export_has_the_names_and_shapes_of_the_published_model(name: str) -> None:
    assert exported_names(name) == PUBLISHED[name]["tensors"]


@pytest.mark.parametrize("trained", TRAINED)
@pytest.mark.parametrize("name", NATIVE)
def test_a_native_familys_export_has_them_too_whatever_was_trained(name: str, trained: str) -> None:
    """Of all strategies, whose checkpoints are read by the names of this blueprint."""
    config = ModelConfig.model_validate(NATIVE[name] | TRAINED[trained])
    family = family_of(config)
    tokenizer = make_tokenizer("train:300", ["USER: what digit is this? ASSISTANT:"], image_form_of(config))
    model = family.blueprint(without_adapters(config), tokenizer)
    expected = {stored for stored in PUBLISHED[name]["tensors"] if not stored.startswith(LACKED.get(name, " "))}
    assert names_of(shapes(stored_tensors(published_form(model)))).keys() == expected


# As other programs look for them: vLLM's and llama.cpp's loaders, and what people print of these models' indexes.
@pytest.mark.parametrize(
    ("name", "tensors"),
    {
        "llava": ["vision_tower.vision_model.embeddings.class_embedding", "language_model.model.embed_tokens.weight"],
        "smolvlm": ["model.connector.modality_projection.proj.weight", "model.text_model.embed_tokens.weight"],
        "qwen2_5_vl": ["visual.merger.ln_q.weight", "model.embed_tokens.weight"],
        "molmo2": ["model.transformer.wte.new_embedding", "model.vision_backbone.image_vit.positional_embedding"],
        "qianfan_ocr": ["language_model.model.layers.#.mlp.down_proj.weight", "mlp1.#.weight"],
        "kimi_k25": ["language_model.model.layers.#.mlp.gate.weight", "vision_tower.patch_embed.proj.weight"],
    }.items(),
)
def test_names_that_are_known_of_published_files(name: str, tensors: list[str]) -> None:
    assert not set(tensors) - PUBLISHED[name]["tensors"].keys()


@pytest.mark.parametrize("name", chosen({name: name for name in MODELS}, lambda name: name in FORMS))
def test_an_export_reads_back_as_it_was_however_it_is_cut(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config_named(name)).float()
    state = model.state_dict()
    written = write_weights(blueprint(name), state.__getitem__, tmp_path, max_shard_bytes=8192)
    model.config.save_pretrained(tmp_path)
    loaded, info = AutoModelForImageTextToText.from_pretrained(tmp_path, output_loading_info=True, dtype=torch.float32)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert written.weights_sha256 == weights_sha256(model) == weights_sha256(loaded)
    found = {}
    for file in tmp_path.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            found |= {tensor: opened.get_slice(tensor).get_shape() for tensor in opened.keys()}  # noqa: SIM118
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert names_of(found) == PUBLISHED[name]["tensors"]


def test_weights_come_by_name_and_few_wait_for_others() -> None:
    for name in FORMS:
        last = [together.weights[-1] for together in published_form(blueprint(name))]
        assert last == sorted(last)
        assert max(len(together.weights) for together in published_form(blueprint(name))) <= 3


@pytest.mark.parametrize("model_type", chosen({name: name for name in INSTALLED}, lambda name: name == "qwen3_vl_moe"))
def test_training_starts_from_the_published_form_with_the_same_values(model_type: str, tmp_path: Path) -> None:
    """Where rules change values under the same name, too: experts are transposed in files of Qwen3-VL-MoE."""
    base, tokenizer, folder = publish(model_type, tmp_path / "base"), tokenizer_of(model_type), tmp_path / "published"
    config = ModelConfig.model_validate(model_section(base))
    family = family_of(config)
    form, expected = family.blueprint(config, tokenizer), family.build(config, tokenizer).state_dict()
    folder.mkdir()
    write_weights(form, expected.__getitem__, folder)
    save_settings(family, config, form, tokenizer, folder)
    started = ModelConfig.model_validate(model_section(folder))
    found = family.build(started, tokenizer).state_dict()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    weights = family.initial_weights(started, tokenizer)
    assert [name for name in expected if not torch.equal(weights.read(name), expected[name])] == []
