"""Quantized exports hold the nearest values of their format, and transformers opens every tensor of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import (
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

from vlmpipe.trainer.checkpoint.export.safetensors_writer import write_weights
from vlmpipe.trainer.checkpoint.quantized.layers import quantized_layers
from vlmpipe.trainer.checkpoint.quantized.writer import write_quantized
from vlmpipe.trainer.config.checkpoint import QuantizedFormat
from vlmpipe.trainer.errors import ConfigError, MissingPackageError
from vlmpipe.trainer.models.hf_native import family as opening
from vlmpipe.trainer.models.hf_native.family import load_export

TEXT: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 100,
}  # fmt: skip
SIGLIP = {
    "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "image_size": 16, "patch_size": 8, "vision_use_head": False,
}  # fmt: skip
VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
IDS = torch.arange(10, 22)[None]
FORMATS: tuple[QuantizedFormat, ...] = ("int4", "fp8")
LEFT = {
    "llava": ("lm_head", "multi_modal_projector", "vision_tower"),
    "qwen2_5_vl": ("lm_head", "visual"),
}


def made(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "llava":
        config = LlavaConfig(vision_config=SIGLIP, text_config={"model_type": "qwen2", **TEXT}, image_token_index=5)
        return LlavaForConditionalGeneration(config).eval()
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
    config = Qwen2_5_VLConfig(text_config=TEXT | {"rope_parameters": rope}, vision_config=VISION)
    return Qwen2_5_VLForConditionalGeneration(config).eval()


@pytest.fixture(scope="module", params=sorted(LEFT))
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, Path]:
    model, folder = made(request.param), tmp_path_factory.mktemp("export")
    state = model.state_dict()
    write_weights(model, state.__getitem__, folder, max_shard_bytes=100_000)  # several files, with an index
    model.config.save_pretrained(folder)
    return request.param, model, folder


def nearest(weight: Tensor, form: QuantizedFormat, group: int) -> Tensor:
    """The values of the format that are nearest, by arithmetic of its definition."""
    grouped = weight.unflatten(1, (-1, group or weight.shape[1]))
    most = grouped.abs().amax(2, keepdim=True)
    if form == "int4":
        scale = most / 7.5
        return ((grouped / scale).round().clamp(-8, 7) * scale).flatten(1)
    scale = most / 448
    return ((grouped / scale).to(torch.float8_e4m3fn).float() * scale).flatten(1)


@pytest.mark.parametrize("form", FORMATS)
def test_layers_have_the_nearest_values_and_all_else_its_own(
    form: QuantizedFormat, exported: tuple[str, Any, Path], tmp_path: Path
) -> None:
    kind, model, folder = exported
    layers = quantized_layers(model, form)
    assert (len(layers.stored), layers.left, layers.group_size) == (14, LEFT[kind], 32 if form == "int4" else 0)
    write_quantized(folder, tmp_path / form, form, layers)
    loaded = load_export(type(model), tmp_path / form, torch.float32)
    is_quantized = {name for name, _ in model.named_modules() if ".layers." in name and name.endswith("_proj")}
    is_quantized = {name for name in is_quantized if "vision" not in name and "visual" not in name}
    assert len(is_quantized) == 14
    for name, weight in model.state_dict().items():
        expected = weight
        if name.endswith(".weight") and name.removesuffix(".weight") in is_quantized:
            expected = nearest(weight, form, layers.group_size)
            assert not torch.equal(expected, weight)
        torch.testing.assert_close(loaded.state_dict()[name], expected, rtol=0, atol=1e-6, msg=name)
    model_of_values = made(kind)
    model_of_values.load_state_dict({name: loaded.state_dict()[name] for name in model.state_dict()})
    with torch.inference_mode():
        logits, of_values = (one(input_ids=IDS).logits for one in (loaded, model_of_values))
    difference = float((logits - of_values).abs().max())
    if form == "int4":
        assert difference < 1e-6
    else:
        assert 1e-6 < difference < 0.05, "activations are rounded, too"


@pytest.mark.parametrize("form", FORMATS)
def test_files_are_as_small_and_named_as_the_format_says(
    form: QuantizedFormat, exported: tuple[str, Any, Path], tmp_path: Path
) -> None:
    _, model, folder = exported
    layers = quantized_layers(model, form)
    write_quantized(folder, tmp_path / form, form, layers)
    index = json.loads((tmp_path / form / "model.safetensors.index.json").read_text())["weight_map"]
    stored: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for path in sorted((tmp_path / form).glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in list(file.keys()):
                assert index.pop(name) == path.name
                tensor = file.get_tensor(name)
                stored[name] = (tensor.dtype, tuple(tensor.shape))
    assert not index
    layer = next(name for name in layers.stored if name.endswith("0.mlp.down_proj"))  # 96 inputs, 64 outputs
    if form == "int4":
        expected = {
            "weight_packed": (torch.int32, (64, 12)), "weight_scale": (torch.float32, (64, 3)),
            "weight_shape": (torch.int64, (2,)),
        }  # fmt: skip
    else:
        expected = {"weight": (torch.float8_e4m3fn, (64, 96)), "weight_scale": (torch.float32, (64, 1))}
    assert {name.removeprefix(f"{layer}."): form for name, form in stored.items() if layer in name} == expected
    config = json.loads((tmp_path / form / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "compressed-tensors"
    assert config["format"] == {"int4": "pack-quantized", "fp8": "float-quantized"}[form]


def test_a_tensor_that_transformers_leaves_out_is_an_error(exported: tuple[str, Any, Path], tmp_path: Path) -> None:
    _, model, folder = exported
    layers = quantized_layers(model, "int4")
    write_quantized(folder, tmp_path / "int4", "int4", layers)
    path = tmp_path / "int4/config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["ignore"].append("re:.*down_proj")  # which is quantized
    path.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="transformers does not find or know 8 tensors"):
        load_export(type(model), tmp_path / "int4", torch.float32)


def test_without_the_package_its_extra_is_named(
    exported: tuple[str, Any, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, model, folder = exported
    write_quantized(folder, tmp_path / "fp8", "fp8", quantized_layers(model, "fp8"))
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(MissingPackageError, match=r"vlmpipe\[quantized\]"):
        write_quantized(folder, tmp_path / "again", "fp8", quantized_layers(model, "fp8"))
    with pytest.raises(MissingPackageError, match=r"vlmpipe\[quantized\]"):
        opening.load_export(type(model), tmp_path / "fp8", torch.float32)


@pytest.mark.parametrize(("form", "sides"), [("int4", "inputs are multiples of 32"), ("fp8", "multiples of 16")])
def test_sides_that_no_kernel_takes_are_refused(form: QuantizedFormat, sides: str) -> None:
    text = {"model_type": "qwen2", **TEXT, "intermediate_size": 72}
    with torch.device("meta"):
        model = LlavaForConditionalGeneration(LlavaConfig(vision_config=SIGLIP, text_config=text))
    with pytest.raises(ConfigError, match=sides):
        quantized_layers(model, form)


def test_a_mixture_of_experts_is_refused() -> None:
    text = TEXT | {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32}
    with torch.device("meta"):
        model = Qwen3VLMoeForConditionalGeneration(
            Qwen3VLMoeConfig(text_config=text, vision_config=VISION | {"deepstack_visual_indexes": [0]})
        )
    with pytest.raises(ConfigError, match="mixture of experts"):
        quantized_layers(model, "int4")
