"""Weights from a folder: no code beside them is run, and no special file among them is waited for."""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoImageProcessor, AutoModel, CLIPVisionConfig, CLIPVisionModel

from tests.support.hf.publish import model_section, publish, tokenizer_of
from tests.support.paths import ROOT
from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.config.weights.origin import WeightsConfig
from vlmpipe.trainer.data.tokenize import make_tokenizer
from vlmpipe.trainer.errors import ConfigError, DataError, UserError
from vlmpipe.trainer.models.hf_native.pretrained import load_complete, load_pretrained, part_config
from vlmpipe.trainer.models.registry import family_of

PACKAGES = ("vlmpipe", "pipelines", "components", "trainer")
LOADERS = ("from_pretrained", "from_config")
NO_CODE = (
    "GenerationConfig",
    "PeftConfig",
    "PeftModel",
)  # what they load names no code, and they take no such argument
FOREIGN = """from pathlib import Path
Path(__file__).with_name("was-run").touch()
from transformers import CLIPVisionConfig, CLIPVisionModel, PreTrainedTokenizerFast
class Config(CLIPVisionConfig):
    model_type = "foreign"
class Model(CLIPVisionModel):
    pass
class Tokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A model whose files name Python code beside them, as some models of the hub do."""
    classes = {"AutoConfig": "code.Config", "AutoModel": "code.Model", "AutoTokenizer": ["code.Tokenizer"] * 2}
    classes |= {"AutoImageProcessor": "code.Config"}
    content = {"model_type": "foreign", "auto_map": classes, "tokenizer_class": "Tokenizer"}
    for name in ("config.json", "tokenizer_config.json", "preprocessor_config.json"):
        (tmp_path / name).write_text(json.dumps(content))
    (tmp_path / "code.py").write_text(FOREIGN)
    return tmp_path


@pytest.mark.parametrize(
    "load",
    [
        lambda part: part_config(part),
        lambda part: load_pretrained(AutoModel, part),
        lambda part: load_pretrained(AutoImageProcessor, part),
        lambda part: make_tokenizer(part.weights, []),
    ],
    ids=["configuration", "weights", "image processor", "tokenizer"],
)
def test_code_beside_weights_is_never_run(
    foreign: Path, load: Callable[[WeightsConfig], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(foreign / "modules"))
    with pytest.raises(UserError):
        load(WeightsConfig(weights=str(foreign)))
    assert not list(foreign.rglob("was-run"))


def test_a_model_with_code_of_its_own_is_refused_for_that(foreign: Path) -> None:
    with pytest.raises(ConfigError, match="code of its own"):
        part_config(WeightsConfig(weights=str(foreign)))


def test_the_folder_would_run_its_code_if_it_were_trusted(foreign: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(foreign / "modules"))
    AutoConfig.from_pretrained(foreign, trust_remote_code=True)
    assert list(foreign.rglob("was-run"))


def test_every_call_says_that_code_is_not_trusted() -> None:
    calls = [call for package in PACKAGES for file in (ROOT / package).rglob("*.py") for call in _calls(file)]
    assert len(calls) >= 8
    for place, call in calls:
        words = {word.arg: word.value for word in call.keywords}
        trusted = words.get("trust_remote_code")
        assert isinstance(trusted, ast.Constant) and trusted.value is False, place


def _calls(file: Path) -> list[tuple[str, ast.Call]]:
    text = file.read_text(encoding="utf-8")
    nodes = ast.walk(ast.parse(text)) if any(f".{name}" in text for name in LOADERS) else ()
    found = [node for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    calls = [(ast.unparse(call.func).split("."), call) for call in found if call.func.attr in LOADERS]
    return [(f"{file}:{call.lineno}", call) for (*of, _), call in calls if of[-1] not in NO_CODE]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "generation_config.json"])
def test_a_special_file_among_weights_is_named(tmp_path: Path, name: str) -> None:
    config = CLIPVisionConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    CLIPVisionModel(config).save_pretrained(tmp_path)
    part = WeightsConfig(weights=str(tmp_path))
    assert load_complete(CLIPVisionModel, part).dtype == torch.float32
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(DataError, match=f"{name} is a FIFO"):
        load_complete(CLIPVisionModel, part)


def test_weights_that_are_missing_are_never_drawn(tmp_path: Path) -> None:
    config = CLIPVisionConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    model = CLIPVisionModel(config)
    state = {name: tensor for name, tensor in model.state_dict().items() if "fc1" not in name}
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(ConfigError, match=r"lacks 2 weights of CLIPVisionModel, for example .*fc1\.bias"):
        load_complete(CLIPVisionModel, WeightsConfig(weights=str(tmp_path)))


def test_a_model_of_a_bf16_configuration_has_the_constants_of_fp32(tmp_path: Path) -> None:
    """Gemma's scale of embeddings is the root of a width, and transformers loads it so for the evaluation."""
    base = publish("gemma3", tmp_path)
    content = json.loads((base / "config.json").read_text())
    for section in (content, content["text_config"], content["vision_config"]):
        section["dtype"] = "bfloat16"
    (base / "config.json").write_text(json.dumps(content))
    config, tokenizer = ModelConfig.model_validate(model_section(base)), tokenizer_of("gemma3")
    family, scale = family_of(config), "model.language_model.embed_tokens.embed_scale"
    expected = family.load(base).get_buffer(scale)
    for model in (family.build(config, tokenizer), family.blueprint(config, tokenizer, buffers=True)):
        assert torch.equal(model.get_buffer(scale), expected)
