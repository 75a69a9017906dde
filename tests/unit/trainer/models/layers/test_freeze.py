"""Which parameters patterns choose, and the sentences that refuse what cannot be."""

from __future__ import annotations

import fnmatch
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import nn

from tests.support.trainer.flop_cases import CLIP, LLAMA, model_config
from tests.support.trainer.tiny_native import model_section
from tests.support.trainer.tiny_runs import TINY, merged
from vlmpipe.config.run_config import RunConfig, parse_run_config
from vlmpipe.pipelines.check import check_run
from vlmpipe.planner.model_architecture import architecture
from vlmpipe.planner.plan import plan_run
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.models.layers.freeze import described, frozen_weights, in_frozen_parts, part_of, tied_names
from vlmpipe.trainer.models.layers.lora import without_adapters
from vlmpipe.trainer.models.registry import family_of
from vlmpipe.trainer.sizing.model_shape import ModelShape
from vlmpipe.trainer.weights_digest import model_sha256

FAMILIES = ("llava", "qwen2_5_vl", "qwen3_vl", "smolvlm")
PARTS = ("tower", "projector", "language_model")
PATTERNS = ("*", "*layers.0.*", "*.embed_tokens.*", "*norm*", "*layers.[12].mlp*", "*.bias", "lm_head.*", "*vision*")


def skeleton(config: ModelConfig, *, layers: int | None = None) -> nn.Module:
    with torch.device("meta"):
        return family_of(config).skeleton(config, vocabulary=300, language_layers=layers)


def trained(config: ModelConfig) -> set[str]:
    return {name for name, parameter in skeleton(config).named_parameters() if parameter.requires_grad}


def shape_of(config: ModelConfig) -> ModelShape:
    return family_of(config).shape(config)


def of_family(family: str, **more: Any) -> ModelConfig:
    return model_config(**more) if family == "llava" else ModelConfig(**model_section(family, **more))


def run_file(**model: Any) -> RunConfig:
    changes = {f"model.{name}": value for name, value in model.items()}
    return parse_run_config(merged(TINY, changes | {"features.cache": changes.pop("model.cache", "off")}), "a test")


@settings(max_examples=15, deadline=None)
@given(
    parts=st.sets(st.sampled_from(PARTS)),
    freeze=st.lists(st.sampled_from(PATTERNS), max_size=3),
    train=st.lists(st.sampled_from(PATTERNS), max_size=2),
)
def test_train_parameters_override_freeze_parameters_which_override_freeze(
    parts: set[Any], freeze: list[str], train: list[str]
) -> None:
    def named(name: str, patterns: list[str]) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)

    found = trained(model_config(freeze=tuple(parts), freeze_parameters=freeze, train_parameters=train))
    assert found == {
        name
        for name in trained(model_config(freeze=()))
        if named(name, train) or (part_of(name) not in parts and not named(name, freeze))
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_count_what_is_trained_to_the_last_parameter(family: str) -> None:
    config = of_family(
        family,
        freeze=["projector"],
        freeze_parameters=["*embed_tokens*", "*layers.1.*", "*.[01].mlp.up_proj*", "*self_attn.q_proj*"],
        train_parameters=["*norm*"],
    )
    shape, model = shape_of(config), skeleton(config)
    counts = dict.fromkeys(PARTS, 0)
    for name, parameter in model.named_parameters():
        counts[part_of(name)] += parameter.numel() * parameter.requires_grad
    found = shape.trained
    assert found["tower"] == counts["tower"] > 0 and found["projector"] == counts["projector"]
    language = sum(found[part] for part in ("embedding", "language_layers", "head"))
    assert language == counts["language_model"] and 0 < language < sum(shape.parameters.values())
    assert shape.trainable_parameters == sum(counts.values())
    layers = [*model.model.get_submodule(_language(family)).layers]
    of_layers = [sum(one.numel() for one in layer.parameters() if one.requires_grad) for layer in layers]
    assert [shape.trained_in_layer(number) for number in range(len(layers))] == of_layers
    assert len(set(of_layers)) > 1, "layers must differ"


def _language(family: str) -> str:
    return "text_model" if family == "smolvlm" else "language_model"


def test_a_part_frozen_by_patterns_equals_one_frozen_by_name() -> None:
    by_part, by_pattern = (
        shape_of(model_config(**section))
        for section in ({"freeze": ("tower", "projector")}, {"freeze_parameters": ["*projector*"]})
    )
    assert by_pattern.frozen == by_part.frozen and by_pattern.trained == by_part.trained


def test_a_model_of_fewer_layers_has_the_first_ones_as_they_are() -> None:
    """Traces are taken of such models: a pattern that names a later layer is no mistake there."""
    config = model_config(freeze_parameters=["*language_model.layers.2.*", "*language_model.layers.0.mlp.*"])
    frozen = {name for name, one in skeleton(config, layers=1).named_parameters() if not one.requires_grad}
    assert {name for name in frozen if "language_model" in name} == {
        f"model.language_model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")
    }


@pytest.mark.parametrize("field", ["freeze_parameters", "train_parameters"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_pattern_without_match_is_answered_with_similar_names(field: str, family: str) -> None:
    config = of_family(family, **{field: ["*.layer.[0-9].self_attn.q_proj.*"]})
    with pytest.raises(ConfigError) as caught:
        shape_of(config)
    assert f"model.{field} has '*.layer.[0-9].self_attn.q_proj.*', which matches no parameter" in caught.value.found
    assert "layers.0.self_attn.q_proj.weight" in caught.value.expected


def test_patterns_are_case_sensitive() -> None:
    with pytest.raises(ConfigError, match="matches no parameter"):
        shape_of(model_config(freeze_parameters=["*LM_HEAD*"]))


def test_a_tied_head_goes_by_the_embeddings_name() -> None:
    tied = {"language_model": LLAMA}
    with pytest.raises(ConfigError, match=r"lm_head.weight is the same parameter as model.language_model.embed_tokens"):
        shape_of(model_config(**tied, freeze_parameters=["lm_head.*"]))
    shape = shape_of(model_config(**tied, freeze_parameters=["*.embed_tokens.*"]))
    assert {"embedding", "head"} <= shape.frozen and "language_layers" not in shape.frozen


def test_without_numbers_a_tied_head_is_frozen_with_the_embedding() -> None:
    """On the meta device they are two parameters, and an export would look for the other one in the checkpoint."""
    model = skeleton(model_config(language_model=LLAMA, freeze_parameters=["*.embed_tokens.*"]))
    assert tied_names(model) == {"lm_head.weight": "model.language_model.embed_tokens.weight"}
    assert not model.lm_head.weight.requires_grad


def test_parameters_without_gradient_cannot_be_trained() -> None:
    behind = "*vision_tower.encoder.layers.2.*"
    with pytest.raises(ConfigError, match=r"names only parameters that get no gradient, .* after model.feature_layer"):
        shape_of(model_config(tower=CLIP, feature_layer=-2, train_parameters=[behind]))
    assert shape_of(model_config(tower=CLIP, feature_layer=-1, train_parameters=[behind])).trained["tower"]


@pytest.mark.parametrize("field", ["freeze_parameters", "train_parameters"])
def test_with_lora_patterns_may_not_match_the_language_model(field: str) -> None:
    with pytest.raises(ConfigError, match=r"names .* of the language model, and model.lora trains adapters in place"):
        shape_of(model_config(lora={"rank": 2}, **{field: ["*norm*"]}))


@pytest.mark.parametrize("field", ["freeze_parameters", "train_parameters"])
def test_a_pattern_and_rows_of_tokens_may_not_name_the_same_matrix(field: str) -> None:
    with pytest.raises(ConfigError, match=rf"model\.{field} has .*, which names .*embed_tokens\.weight.* some rows of"):
        shape_of(model_config(lora={"rank": 2, "train_tokens": ["<s>"]}, **{field: ["*embed_tokens*"]}))


@pytest.mark.parametrize("family", ["llava", *FAMILIES[1:]])
def test_with_lora_embedding_and_head_may_be_trained_whole(family: str) -> None:
    config = of_family(family, lora={"rank": 2}, train_parameters=["*embed_tokens.weight"])
    adapters = {name for name in trained(config) if "lora_" in name}
    language = {name for name in trained(config) - adapters if part_of(name) == "language_model"}
    model = skeleton(config)
    rows = {id(model.get_input_embeddings().weight)}
    rows |= {id(model.get_parameter(name)) for name in tied_names(model)}
    assert adapters and {id(model.get_parameter(name)) for name in language} == rows
    assert trained(without_adapters(config)) == trained(config) - adapters


def test_beside_a_quantized_base_they_may_not() -> None:
    lora = {"rank": 2, "quantize_base": "nf4"}
    with pytest.raises(ConfigError, match="and the head of a base that is not quantized"):
        shape_of(model_config(lora=lora, train_parameters=["*embed_tokens.weight"]))


def test_with_lora_patterns_choose_tower_and_projector_parameters_also_in_the_export() -> None:
    config = model_config(lora={"rank": 2}, train_parameters=["*vision_tower*norm1*"])
    adapters = {name for name in trained(config) if "lora_" in name}
    plain = trained(without_adapters(config))
    assert trained(config) - adapters == plain
    assert any("vision_tower" in name for name in plain) and not any("language_model" in name for name in plain)
    assert not in_frozen_parts(skeleton(config)) >= set(skeleton(config).parameters())


def test_frozen_weights_of_a_partly_trained_tower_are_listed() -> None:
    """A tower that is frozen as a whole has a digest of its own."""
    thawed, frozen = (
        frozen_weights(skeleton(config))
        for config in (
            model_config(train_parameters=["*vision_tower*layer_norm*"], freeze_parameters=["lm_head.*"]),
            model_config(freeze_parameters=["lm_head.*"]),
        )
    )
    assert frozen.keys() == {"lm_head.weight"}
    assert {part_of(name) for name in thawed} == {"tower", "language_model"}
    assert not any("layer_norm" in name for name in thawed)


def test_what_fsdp_leaves_whole_are_parts_in_which_nothing_is_trained() -> None:
    model = skeleton(model_config(freeze_parameters=["*projector*", "*language_model.layers.0.*"]))
    whole = in_frozen_parts(model)
    parts = {part_of(name) for name, one in model.named_parameters() if one in whole}
    assert parts == {"tower", "projector"}
    adapted = skeleton(model_config(lora={"rank": 2}))
    assert any("base_layer" in name for name, one in adapted.named_parameters() if one in in_frozen_parts(adapted))


def test_planning_refuses_what_training_would() -> None:
    with pytest.raises(ConfigError, match="leaves nothing to train"):
        plan_run(run_file(freeze_parameters=["*"]))
    with pytest.raises(ConfigError, match="matches no parameter"):
        plan_run(run_file(freeze_parameters=["*layer.0*"]))
    with pytest.raises(ConfigError, match=r"features are cached, and .* thaws [\d,]+ parameters of the tower"):
        architecture(run_file(train_parameters=["*vision_tower*norm*"], cache="on"))


def test_check_says_how_much_patterns_leave_or_why_they_fail() -> None:
    def found(**model: Any) -> tuple[str, str]:
        finding = next(one for one in check_run(run_file(**model)) if one.subject == "parameters")
        return finding.state, finding.text

    state, text = found(freeze_parameters=["*.embed_tokens.*"])
    assert state == "ok" and text.endswith("are trained")
    state, text = found(freeze_parameters=["*layer.0*"])
    assert state == "failed" and "matches no parameter" in text
    assert found()[0] == "ok"


def test_an_empty_pattern_is_refused_with_the_file() -> None:
    with pytest.raises(ValidationError, match="at least 1 character"):
        model_config(freeze_parameters=[""])


def test_a_model_without_patterns_keeps_its_digest() -> None:
    """Checkpoints of before these fields name it."""
    section = merged(TINY, {}) | {"run": {"run_id": "r", "root_uri": "/r"}}
    plain, chosen = (
        JobConfig.model_validate(merged(section, changes))
        for changes in ({}, {"model.train_parameters": ["*vision_tower*"]})
    )
    assert model_sha256(plain) == "8427904bfee3fa39e6f7dc2a2f2137912afbcb8a70212ab8b01861f4c81e8289"
    assert model_sha256(chosen) != model_sha256(plain)


def test_a_card_says_what_was_not_trained() -> None:
    assert described(model_config(freeze=())) == "nothing: all parts were trained"
    assert described(model_config()) == "tower"
    config = model_config(freeze_parameters=["*.embed_tokens.*"], train_parameters=["*norm*"])
    assert described(config) == "tower; *.embed_tokens.*; but for *norm*"
