"""Adapters in a model, without training: where they go, how they are counted, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn
from transformers import GPT2Config, LlavaConfig, PreTrainedTokenizerFast

from tests.support.hf.publish import model_section, publish
from tests.support.hf.publish import tokenizer_of as published_tokenizer
from tests.support.short_form import chosen
from tests.support.trainer.flop_cases import CASES, LLAMA, QWEN2, model_config
from vlmpipe.config.rules.warnings import layers_without_adapters
from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.config.optimizer import OptimizerConfig
from vlmpipe.trainer.config.weights.lora import LoraConfig
from vlmpipe.trainer.data.tokenize import make_tokenizer
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.models.image_tokens import image_form_of
from vlmpipe.trainer.models.layers.freeze import frozen_weights, is_adapter, token_rows
from vlmpipe.trainer.models.layers.lora import adapters_of, add_adapters, train_rows_only, without_adapters
from vlmpipe.trainer.models.layers.recompute_policy import Recompute
from vlmpipe.trainer.models.llava.family import LlavaFamily
from vlmpipe.trainer.models.registry import family_of
from vlmpipe.trainer.optimizer.build import build_optimizer

FAMILY = LlavaFamily()


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return tokenizer_of(model_config())


def tokenizer_of(config: ModelConfig) -> PreTrainedTokenizerFast:
    return make_tokenizer("train:300", ["USER: what digit is this? ASSISTANT:", " 7"], image_form_of(config))


# With adapters, and without any one of each way to freeze.
PLAIN = ("siglip and qwen2 with grouped queries", "half of each layer", "norms of the tower")
TRIED = chosen(CASES, lambda name: "adapters" in name or name in PLAIN)


@pytest.mark.parametrize("case", TRIED)
def test_a_shape_counts_as_trained_what_a_model_trains(case: str) -> None:
    """Also of a tower, of which the layers behind the features are not trained."""
    config = model_config(**CASES[case])
    family = family_of(config)
    with torch.device("meta"):
        model = family.skeleton(config, vocabulary=300)
        model.tie_weights()
    shape, parameters = family.shape(config), list(model.parameters())
    assert shape.total_parameters == sum(weight.numel() for weight in parameters)
    assert shape.trainable_parameters == sum(weight.numel() for weight in parameters if weight.requires_grad)
    layers = family.blocks(family.training_module(config, model, cached=False)).language_layers
    of_layers = [sum(weight.numel() for weight in layer.parameters() if weight.requires_grad) for layer in layers]
    assert shape.trained_per_layer() == max(of_layers)


def test_adapters_start_without_effect_and_the_same_in_every_process(tokenizer: PreTrainedTokenizerFast) -> None:
    config = model_config(lora={"rank": 4, "dropout": 0.1})
    torch.manual_seed(1)
    first = FAMILY.build(config, tokenizer)
    torch.manual_seed(2)
    second, plain = FAMILY.build(config, tokenizer), FAMILY.build(without_adapters(config), tokenizer)
    found, expected = dict(first.named_parameters()), dict(second.named_parameters())
    assert found.keys() == expected.keys() and all(found[name].equal(expected[name]) for name in expected)
    assert all(found[name].any() == ("lora_A" in name) for name in found if is_adapter(name))
    other = FAMILY.build(config.model_copy(update={"seed": 1}), tokenizer)
    assert not any(weight.equal(found[name]) for name, weight in other.named_parameters() if "lora_A" in name)
    inputs = {"input_ids": torch.arange(20)[None]}
    with torch.no_grad():
        assert torch.equal(first.eval()(**inputs).logits, plain.eval()(**inputs).logits)


def test_layers_that_peft_takes_for_experts_are_left_out_or_refused_where_they_are_named(tmp_path: Path) -> None:
    """By the names of dense layers, of which it would adapt the experts, with another rank."""
    base = publish("glm4v_moe", tmp_path)

    def section(**lora: Any) -> ModelConfig:
        return ModelConfig.model_validate(model_section(base, freeze=["tower"], lora={"rank": 2, **lora}))

    def build(**lora: Any) -> nn.Module:
        config = section(**lora)
        return family_of(config).blueprint(config, published_tokenizer("glm4v_moe"))

    for named in (["gate_proj", "up_proj"], ["down_proj"]):
        with pytest.raises(ConfigError, match=r"glm4v_moe model than model.lora names: .*mlp") as caught:
            build(targets=named)
        assert "model.lora.targets" in caught.value.fix
    experts = {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}
    for more, expected in (({}, experts), ({"use_dora": True}, set()), ({"dropout": 0.1}, set())):
        names = {name.partition("layers.")[2][2:].removesuffix(".weight") for name in adapters_of(build(**more))}
        assert names == expected | {f"self_attn.{name}_proj" for name in "qkvo"}
    shape = family_of(section()).shape(section())
    (problem,) = layers_without_adapters(shape)
    plain = family_of(section()).blueprint(without_adapters(section()), published_tokenizer("glm4v_moe")).get_decoder()
    idle = ("mlp.gate.weight", "gate_proj.weight", "mlp.up_proj.weight", "experts.up_proj.weight", "down_proj.weight")
    named = dict(plain.layers.named_parameters())
    left_out = sum(weight.numel() for name, weight in named.items() if name.endswith(idle))
    whole = sum(weight.numel() for weight in plain.parameters()) - plain.embed_tokens.weight.numel()
    assert problem.field == "model.lora" and f"leaves {left_out / whole:.2%} of the language model's" in problem.text
    assert "mlp.shared_experts.gate_proj" in problem.text and "layers that PEFT takes for experts" in problem.text


def test_a_model_whose_layers_are_all_experts_has_a_shape(tmp_path: Path) -> None:
    """Its configuration has no intermediate_size."""
    base = publish("qwen3_5_moe", tmp_path)
    config = ModelConfig.model_validate(model_section(base, freeze=["tower"], lora={"rank": 2}))
    shape = family_of(config).shape(config)
    assert shape.language.intermediate == 2 * 16 + 16, "two experts compute a token, and the shared one"
    assert shape.adapters["mlp.experts"] == 4 * 2 * (32 + 16) and "linear_attn.in_proj_qkv" in shape.adapters


@pytest.mark.parametrize("case", TRIED)
def test_frozen_weights_have_the_names_of_the_export(case: str) -> None:
    """By these a checkpoint's base is told from another, in training and in an export."""
    config = model_config(**CASES[case])
    family, tokenizer = family_of(config), tokenizer_of(config)
    exported = family.blueprint(without_adapters(config), tokenizer)
    initial = family.initial_weights(config, tokenizer)
    frozen = frozen_weights(family.build(config, tokenizer))
    checked = frozen_weights(family.blueprint(config, tokenizer))
    assert frozen.keys() == checked.keys() <= exported.state_dict().keys()
    assert all(initial.read(name).equal(frozen[name]) for name in sorted(frozen))
    behind_features = config.family == "llava" and "tower" not in config.freeze
    by_part = {"projector", "language_model"} & set(config.freeze) or config.has_patterns
    assert bool(frozen) == bool(config.lora or by_part or behind_features)


def test_targets_are_names_in_a_block_or_their_last_parts() -> None:
    lora = {"rank": 2, "targets": ["self_attn.q_proj", "up_proj"]}
    with torch.device("meta"):
        model = FAMILY.skeleton(model_config(lora=lora), vocabulary=300)
    layers = range(3)
    assert adapters_of(model).keys() == {
        *(f"model.language_model.layers.{number}.self_attn.q_proj.weight" for number in layers),
        *(f"model.language_model.layers.{number}.mlp.up_proj.weight" for number in layers),
    }


@pytest.mark.parametrize("target", ["wq", "roj", "lm_head", "layers.0.self_attn.q_proj", "mlp"])
def test_a_target_that_is_no_linear_layer_is_answered_with_the_existing_ones(target: str) -> None:
    with pytest.raises(ConfigError) as caught:
        FAMILY.shape(model_config(lora={"targets": ["v_proj", target]}))
    assert repr(target) in caught.value.found and "qwen2" in caught.value.found
    assert "self_attn.v_proj" in caught.value.expected and "mlp.down_proj" in caught.value.expected


def test_a_language_model_without_linear_layers_is_refused() -> None:
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList([torch.nn.LayerNorm(4)])
    model.get_decoder = lambda: model
    model.config = LlavaConfig(text_config=GPT2Config())
    with pytest.raises(ConfigError, match="language model of a gpt2 model has no linear layers"):
        add_adapters(model, LoraConfig())


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"lora": {"rank": 0}}, "lora.rank"),
        ({"lora": {"alpha": 0}}, "lora.alpha"),
        ({"lora": {"dropout": 1.0}}, "lora.dropout"),
        ({"lora": {"target": ["q_proj"]}}, "lora.target"),
        ({"lora": {}, "freeze": ("tower", "language_model")}, "lora freezes the language model already"),
    ],
)
def test_lora_settings_without_effect_are_refused(parts: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ModelConfig.model_validate(model_config().model_dump() | parts)


@pytest.mark.parametrize("chunk", [0, 3])
@pytest.mark.parametrize("language_model", [QWEN2, LLAMA])
def test_of_an_embedding_and_a_head_only_the_named_rows_learn(
    chunk: int, language_model: dict[str, Any], tokenizer: PreTrainedTokenizerFast
) -> None:
    """Their gradients are those of the matrices trained whole; after steps of AdamW with decay all other rows are the
    same to the bit. The second is a model with a tied head."""
    names = tuple(tokenizer.convert_ids_to_tokens([7, 40, 41]))
    frozen = {"freeze": ("tower", "projector"), "language_model": language_model}
    config = model_config(**frozen, lora={"rank": 4, "train_tokens": names})
    torch.manual_seed(0)
    model = FAMILY.build(config, tokenizer)
    weights = token_rows(model)
    assert {name for name, weight in model.named_parameters() if weight.requires_grad and not is_adapter(name)} == set(
        weights
    )
    ids = torch.tensor([[7, 40, 12, 13, 7, 40, 5, 41, 9, 9, 200, 41]])
    inputs = {
        "input_ids": ids, "position_ids": torch.arange(ids.shape[1])[None], "images": torch.zeros(0, 16, 48),
        "label_index": torch.arange(ids.shape[1] - 1), "label_ids": ids[0, 1:],
    }  # fmt: skip

    def gradients() -> dict[str, torch.Tensor]:
        module = FAMILY.training_module(config, model, cached=True).train()
        module.project = lambda features: features.new_zeros(0, 64)
        Recompute(loss_chunk_tokens=chunk).apply(FAMILY, module)
        module(**inputs).backward()
        return {name: weight.grad.clone() for name, weight in weights.items()}

    whole = gradients()
    model.zero_grad()
    model.lm_head.__dict__.pop("forward", None)
    train_rows_only(model, [7, 40, 41])
    for name, gradient in gradients().items():
        assert whole[name].abs().amax(1).count_nonzero() > 3
        torch.testing.assert_close(gradient[[7, 40, 41]], whole[name][[7, 40, 41]])
        assert gradient.abs().amax(1).nonzero().flatten().tolist() == [7, 40, 41]
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    optimizer = build_optimizer(model, OptimizerConfig(learning_rate=0.01, weight_decay=0.1))
    for _ in range(3):
        optimizer.step()
    for name, weight in weights.items():
        changed = (weight != before[name]).any(1).nonzero().flatten().tolist()
        assert changed == [7, 40, 41], name
