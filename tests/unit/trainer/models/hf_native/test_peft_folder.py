"""Adapters in PEFT's format: PEFT itself loads what is written, training starts from what PEFT writes, and an adapter
that does not fit is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForImageTextToText, PreTrainedTokenizerFast

from tests.support.trainer.flop_cases import model_config
from vlmpipe.trainer.checkpoint.export.hf_export import Merged
from vlmpipe.trainer.checkpoint.export.settings_files import save_settings
from vlmpipe.trainer.config.model import GRID_FAMILIES, ModelConfig
from vlmpipe.trainer.config.weights.origin import PARTS
from vlmpipe.trainer.data.chat.added_tokens import trained_tokens
from vlmpipe.trainer.data.tokenize import make_tokenizer
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.models.hf_native import peft_folder
from vlmpipe.trainer.models.hf_native.peft_folder import ROWS, SETTINGS, WEIGHTS, require_same_adapter, write_adapter
from vlmpipe.trainer.models.image_tokens import image_form_of, image_tokens_of
from vlmpipe.trainer.models.layers.deferred_weights import DeferredWeights
from vlmpipe.trainer.models.layers.lora import rows_in, train_rows_only, without_adapters
from vlmpipe.trainer.models.registry import family_of

LLAVA: dict[str, Any] = {}
SMOLVLM = {"family": "smolvlm"}
QWEN = {"family": "qwen2_5_vl", "max_pixels": 2048}
TIED = {"family": "qwen3_vl", "max_pixels": 2048}
CASES = {
    "the projector is trained too": (LLAVA, {}, ("tower",)),
    "adapters alone, rsLoRA": (SMOLVLM, {"use_rslora": True}, ("tower", "projector")),
    "DoRA in all parts": (LLAVA, {"use_dora": True, "parts": PARTS}, ()),
    "mergers, two layers of a block": (
        QWEN,
        {"parts": ["language_model", "projector"], "targets": ["q_proj", "2"]},
        (),
    ),
}


class Weights:
    """Weights of a model in memory: a checkpoint's WeightReader and a model's Weights."""

    def __init__(self, model: nn.Module) -> None:
        self._state = model.state_dict()
        self.names = set(self._state)

    def read(self, name: str) -> torch.Tensor:
        return self._state[name]


def tokenizer_of(config: ModelConfig) -> PreTrainedTokenizerFast:
    return make_tokenizer("train:300", ["USER: what digit is this? ASSISTANT:", " 7"], image_form_of(config))


def on_base(base: dict[str, Any], folder: Path, lora: dict[str, Any], freeze: tuple[str, ...]) -> ModelConfig:
    """A model section with adapters on a pretrained model, which is made in `folder`."""
    plain = model_config(**base)
    family, tokenizer = family_of(plain), tokenizer_of(plain)
    model = family.build(plain, tokenizer)
    model.save_pretrained(folder)
    save_settings(family, plain, model, tokenizer, folder)
    section = {name: value for name, value in plain.model_dump().items() if name not in PARTS}
    section |= {
        "pretrained": {"weights": str(folder)},
        "freeze": freeze,
        "lora": {"rank": 4, "export": "adapter"} | lora,
    }
    return ModelConfig.model_validate(section)


def with_adapter(config: ModelConfig, folder: Path, **changes: Any) -> ModelConfig:
    """The same, starting from the adapter in `folder`."""
    lora = config.model_dump()["lora"] | {"pretrained": str(folder)} | changes
    return ModelConfig.model_validate(config.model_dump() | {"lora": lora})


def trained(config: ModelConfig) -> nn.Module:
    """A model whose trained parameters have changed."""
    model = family_of(config).build(config, tokenizer_of(config))
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn_like(parameter)
    return model.eval()


@torch.no_grad()
def logits(config: ModelConfig, model: nn.Module) -> torch.Tensor:
    """Of a question with an image in it, through the family's own way with features."""
    family = family_of(config)
    count = image_tokens_of(config)(32, 32)
    ids = torch.tensor([[5, *[int(model.config.image_token_id)] * count, 9, 2, 7, 30]])
    torch.manual_seed(1)
    if config.family in GRID_FAMILIES:
        pixels, grids = torch.rand(count * 4, 96), [(1, 8, 8)]
    else:
        pixels, grids = torch.rand(1, 3, config.image_size, config.image_size), None
    if config.family == "smolvlm":
        return model(input_ids=ids, pixel_values=pixels[None]).logits
    features = family.encode(config, family.tower(model), pixels, grids)
    joined = torch.cat(features) if isinstance(features, list) else features
    inputs = family.generation_inputs(model, ids, family.project(model, joined), torch.tensor(grids) if grids else None)
    return model(**inputs).logits


@pytest.mark.parametrize("case", CASES)
def test_peft_loads_what_is_written_onto_the_base_and_training_starts_from_it(case: str, tmp_path: Path) -> None:
    import peft

    base, lora, freeze = CASES[case]
    config = on_base(base, tmp_path / "base", lora, freeze)
    family, tokenizer, model = family_of(config), tokenizer_of(config), trained(config)
    write_adapter(model, config, Weights(model).read, tmp_path / "adapter")

    plain = AutoModelForImageTextToText.from_pretrained(tmp_path / "base", dtype=torch.float32).eval()
    before = logits(config, plain)
    on_peft = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter").eval().get_base_model()
    found, expected = logits(config, on_peft), logits(config, model)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert (found - before).abs().max() > 1e-3

    merged = family.build(without_adapters(config), tokenizer).eval()
    weights = Merged(model, Weights(model), family.initial_weights(config, tokenizer))
    with torch.no_grad():
        for name, parameter in merged.named_parameters():
            parameter.copy_(weights.read(name))
    torch.testing.assert_close(logits(config, merged), expected, rtol=1e-4, atol=1e-5)

    started = with_adapter(config, tmp_path / "adapter")
    require_same_adapter(started)
    built, deferred = family.build(started, tokenizer), family.blueprint(started, tokenizer, buffers=True)
    DeferredWeights(deferred, family.initial_weights(started, tokenizer), torch.device("cpu")).fill(deferred)
    for name, parameter in model.named_parameters():
        for other in (built, deferred):
            assert other.get_parameter(name).equal(parameter), name
            assert other.get_parameter(name).requires_grad == parameter.requires_grad, name


@pytest.mark.parametrize(("base", "is_tied"), [(SMOLVLM, False), (TIED, True)])
def test_peft_loads_trained_rows_of_tokens_onto_the_base(base: dict[str, Any], is_tied: bool, tmp_path: Path) -> None:
    """As its trainable_token_indices: a file of rows, not of matrices."""
    plain = model_config(**base)
    names = tuple(tokenizer_of(plain).convert_ids_to_tokens([30, 9]))
    config = on_base(base, tmp_path / "base", {"train_tokens": names}, ("tower", "projector"))
    tokenizer = tokenizer_of(config)
    tokens = trained_tokens(config, tokenizer)
    model = family_of(config).build(config, tokenizer)
    train_rows_only(model, tokens)
    torch.manual_seed(3)
    rows = [weight for name, weight in model.named_parameters() if name in rows_in(model)]
    with torch.no_grad():
        for weight in rows:
            weight[tokens] += 0.1 * torch.randn(2, weight.shape[1])
    assert (tokens, len(rows)) == ([9, 30], 1 if is_tied else 2)
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == is_tied
    blueprint = family_of(config).blueprint(config, tokenizer)  # whose head is not tied yet, as an export has it
    train_rows_only(blueprint, tokens)
    write_adapter(blueprint, config, Weights(model).read, tmp_path / "adapter")

    stored = load_file(tmp_path / "adapter" / WEIGHTS)
    assert sum(ROWS in name for name in stored) == len(rows) == sum("lora_" not in name for name in stored)
    assert max(tensor.numel() for tensor in stored.values()) < rows[0].numel() / 4
    on = AutoModelForImageTextToText.from_pretrained(tmp_path / "base", dtype=torch.float32).eval()
    before = logits(config, on)
    import peft

    on_peft = peft.PeftModel.from_pretrained(on, tmp_path / "adapter").eval()
    expected = logits(config, model.eval())
    torch.testing.assert_close(logits(config, on_peft.get_base_model()), expected, rtol=1e-5, atol=1e-5)
    merged = on_peft.merge_and_unload()
    torch.testing.assert_close(logits(config, merged), expected, rtol=1e-5, atol=1e-5)
    assert (before - expected).abs().max() > 1e-3
    export = Merged(blueprint, Weights(model), family_of(config).initial_weights(config, tokenizer))
    for name in (*rows_in(model), "lm_head.weight"):
        assert export.read(name).equal(model.get_parameter(name)), "a merged export has the rows too"


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelConfig, Path]:
    root = tmp_path_factory.mktemp("adapter")
    config = on_base(SMOLVLM, root / "base", {}, ("tower",))
    write_adapter(trained(config), config, Weights(trained(config)).read, root / "adapter")
    return config, root / "adapter"


@pytest.mark.parametrize(
    ("changes", "found", "advice"),
    [
        ({"rank": 8}, "made with other settings", "rank: 4"),
        ({"use_dora": True}, "made with other settings", "use_dora: false"),
    ],
)
def test_an_adapter_made_with_other_settings_is_refused(
    changes: dict[str, Any], found: str, advice: str, adapter: tuple[ModelConfig, Path]
) -> None:
    config, folder = adapter
    with pytest.raises(ConfigError, match=found) as caught:
        require_same_adapter(with_adapter(config, folder, **changes))
    assert advice in caught.value.expected


def test_names_are_made_once_and_not_for_each_matrix(
    adapter: tuple[ModelConfig, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of billions of parameters has hundreds of adapters, and each look goes through all its modules."""
    config, folder = adapter
    started, looks = with_adapter(config, folder), list[object]()
    names = peft_folder.stored_names
    monkeypatch.setattr(peft_folder, "stored_names", lambda model: looks.append(model) or names(model))
    with torch.device("meta"):
        family_of(started).skeleton(started, vocabulary=300)
    assert 0 < len(looks) < 4
    assert len(load_file(folder / WEIGHTS)) > 20


def test_an_adapter_for_another_base_is_refused(adapter: tuple[ModelConfig, Path], tmp_path: Path) -> None:
    _, folder = adapter
    other = on_base(SMOLVLM, tmp_path / "other", {}, ("tower",))
    with pytest.raises(ConfigError, match=r"is an adapter for .*base, and model.pretrained is .*other"):
        require_same_adapter(with_adapter(other, folder))


@pytest.mark.parametrize(
    ("changes", "freeze", "found"),
    [
        ({"targets": ["q_proj"]}, ("tower",), "adapts no layer that model.lora.parts and targets name"),
        ({"parts": ["language_model", "projector"]}, ("tower",), "is no adapter of this model"),
        ({}, ("tower", "projector"), "is no adapter of this model"),
    ],
)
def test_an_adapter_of_other_layers_is_refused(
    changes: dict[str, Any], freeze: tuple[str, ...], found: str, adapter: tuple[ModelConfig, Path]
) -> None:
    config, folder = adapter
    started = with_adapter(config, folder, **changes).model_copy(update={"freeze": freeze})
    with torch.device("meta"), pytest.raises(ConfigError, match=found):
        family_of(started).skeleton(started, vocabulary=300)


@pytest.mark.parametrize(("own", "asked"), [(["q_proj", "up_proj"], []), (["q_proj", "up_proj"], ["q_proj"])])
def test_the_targets_that_the_refusal_of_other_layers_names_load_the_adapter(
    own: list[str], asked: list[str], tmp_path: Path
) -> None:
    config, folder = on_base(SMOLVLM, tmp_path / "base", {"targets": own}, ("tower",)), tmp_path / "adapter"
    model = trained(config)
    write_adapter(model, config, Weights(model).read, folder)

    def build(targets: list[str]) -> None:
        started = with_adapter(config, folder, targets=targets)
        with torch.device("meta"):
            family_of(started).skeleton(started, vocabulary=300)

    with pytest.raises(ConfigError) as caught:
        build(asked)
    named = re.search(r"set model.lora.targets to \[(.*?)\]", caught.value.fix)
    assert named
    build(named[1].split(", "))


def test_an_adapter_of_other_shapes_is_refused(adapter: tuple[ModelConfig, Path], tmp_path: Path) -> None:
    """Also where the base has been replaced under its name."""
    config, folder = adapter
    started = with_adapter(config, folder)
    section = json.loads((folder.parent / "base" / "config.json").read_text())
    section["text_config"]["intermediate_size"] *= 2
    (tmp_path / "config.json").write_text(json.dumps(section))
    wide = {"weights": str(tmp_path)}
    started = ModelConfig.model_validate(started.model_dump() | {"pretrained": wide})
    with (
        torch.device("meta"),
        pytest.raises(ConfigError, match=r"another base: .*down_proj.lora_A.weight is \(4, 64\) instead of \(4, 128\)"),
    ):
        family_of(started).skeleton(started, vocabulary=300)


@pytest.mark.parametrize("content", [None, {"peft_type": "IA3"}])
def test_a_folder_without_a_lora_adapter_is_refused(
    content: dict[str, str] | None, adapter: tuple[ModelConfig, Path], tmp_path: Path
) -> None:
    config, _ = adapter
    if content:
        (tmp_path / SETTINGS).write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="holds no LoRA adapter"):
        require_same_adapter(with_adapter(config, tmp_path))
