"""Exports in bf16: each number of the fp32 model is rounded once, and all settings name the type."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.support.hf.kinds import INSTALLED
from tests.support.hf.publish import model_section, publish, tokenizer_of
from tests.support.hf.published_names import MODELS, blueprint, config_named
from tests.support.short_form import chosen
from tests.support.trainer.tiny_runs import TINY, merged
from vlmpipe.trainer.checkpoint.export.opened_export import require_opens
from vlmpipe.trainer.checkpoint.export.published_form import published_form, stored_tensors
from vlmpipe.trainer.checkpoint.export.safetensors_writer import write_weights
from vlmpipe.trainer.checkpoint.export.settings_files import save_settings
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.errors import ConfigError, UserError
from vlmpipe.trainer.models.layers.bf16 import cast_to_bf16
from vlmpipe.trainer.models.registry import family_of
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.weights_digest import weights_sha256

MERGED = {"rank": 2, "export": "merged"}
# Gemma 4 has buffers that depend on the type of weights, stored ones and computed ones.
READ = chosen({name: name for name in INSTALLED}, lambda name: name == "gemma4")
FORMS = chosen({name: name for name in MODELS}, lambda name: name in ("llava", "glm4v_moe"))


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [
        ({"train.precision": "bf16"}, "bf16"),
        ({"train.precision": "bf16", "checkpoint.export_dtype": "fp32"}, "fp32"),
        ({"train.precision": "bf16", "model.lora": MERGED}, "bf16"),
        ({"train.precision": "bf16-autocast"}, "fp32"),
        ({"train.precision": "fp16"}, "fp32"),
        ({"train.precision": "fp32"}, "fp32"),
        ({"train.precision": "fp32", "checkpoint.export_dtype": "bf16"}, "bf16"),
    ],
)
def test_weights_are_exported_in_the_type_they_were_trained_in(changes: dict[str, Any], dtype: str) -> None:
    section = merged(TINY, changes) | {"run": {"run_id": "r", "root_uri": "/r"}}
    assert JobConfig.model_validate(section).export_dtype == dtype


def test_adapters_stay_fp32() -> None:
    model = {
        "family": "hf",
        "pretrained": {"weights": "a/b"},
        "tokenizer": "a/b",
        "lora": MERGED | {"export": "adapter"},
    }
    section = merged(TINY, {"train.precision": "bf16", "checkpoint.export_dtype": "bf16"}) | {"model": model}
    assert JobConfig.model_validate(section | {"run": {"run_id": "r", "root_uri": "/r"}}).export_dtype == "fp32"


@pytest.mark.parametrize("name", FORMS)
def test_each_weight_is_the_fp32_one_rounded(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model: nn.Module = type(blueprint(name))(config_named(name)).float()
    state, whole, half = model.state_dict(), tmp_path / "fp32", tmp_path / "bf16"
    for folder, form in ((whole, blueprint(name)), (half, blueprint(name).bfloat16())):
        folder.mkdir()
        written = write_weights(form, state.__getitem__, folder, max_shard_bytes=8192)
    assert written.weights_sha256 == weights_sha256(model.bfloat16())
    found, expected = ({k: v for f in d.glob("*.safetensors") for k, v in load_file(f).items()} for d in (half, whole))
    assert found.keys() == expected.keys() == stored_tensors(published_form(blueprint(name))).keys()
    for tensor, value in expected.items():
        rounded = value.bfloat16() if value.is_floating_point() else value
        assert found[tensor].dtype == rounded.dtype and torch.equal(found[tensor], rounded), tensor


def test_numbers_of_another_type_than_the_models_are_refused(tmp_path: Path) -> None:
    form = blueprint("llava")
    with pytest.raises(ConfigError, match=r"of torch\.float16"):
        write_weights(form, lambda name: form.state_dict()[name].half(), tmp_path)


def export(model_type: str, root: Path) -> tuple[nn.Module, Path]:
    """An export in bf16 of a published model whose weights are not bf16's, and its blueprint."""
    config = ModelConfig.model_validate(model_section(publish(model_type, root / "base")))
    family, tokenizer, folder = family_of(config), tokenizer_of(model_type), root / "export"
    form = family.blueprint(config, tokenizer).bfloat16()
    folder.mkdir()
    write_weights(form, family.initial_weights(config, tokenizer).read, folder)
    save_settings(family, config, form, tokenizer, folder)
    return form, folder


def opened(form: nn.Module, folder: Path) -> None:
    (folder.parent / "opened").mkdir()
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    require_opens(open_storage(str(folder.parent)), sizes, form, folder.parent / "opened", is_adapter=False)


@pytest.mark.parametrize("model_type", READ)
def test_what_is_loaded_in_bf16_is_the_fp32_model_with_rounded_weights(model_type: str, tmp_path: Path) -> None:
    """Buffers too: transformers computes some of them in the type of the weights."""
    form, folder = export(model_type, tmp_path)
    opened(form, folder)
    family = family_of(ModelConfig.model_validate(model_section(tmp_path / "base")))
    expected, found = family.load(tmp_path / "base"), family.load(folder, torch.bfloat16)
    cast_to_bf16(expected.parameters())
    for how in ("named_parameters", "named_buffers"):
        there, there_too = dict(getattr(expected, how)()), dict(getattr(found, how)())
        assert there.keys() == there_too.keys()
        if how == "named_parameters":  # the export has rows for tokens that PaliGemma's processor adds
            there_too = {name: weight[: len(there[name])] for name, weight in there_too.items()}
        different = [name for name in there if not torch.equal(there[name], there_too[name])]
        assert not different and all(there[name].dtype == there_too[name].dtype for name in there)


def test_every_part_of_the_configuration_names_the_type(tmp_path: Path) -> None:
    _, folder = export("gemma3", tmp_path)
    content = json.loads((folder / "config.json").read_text())
    for section in (content, content["text_config"], content["vision_config"]):
        assert (section["dtype"], section["torch_dtype"]) == ("bfloat16", "bfloat16")


def test_an_export_in_another_type_than_it_should_be_does_not_open(tmp_path: Path) -> None:
    form, folder = export("llava", tmp_path)
    with pytest.raises(UserError, match=r"of torch\.bfloat16 instead of"):
        opened(form.float(), folder)
