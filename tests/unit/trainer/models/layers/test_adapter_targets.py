"""Which layers and experts get adapters by default, and what is said of the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from tests.support.short_form import chosen
from vlmpipe.trainer.config.weights.lora import LoraConfig
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.models.layers import adapter_targets
from vlmpipe.trainer.models.layers.adapter_targets import left_out, targets_of

# Text of Qwen3.5 35B-A3B and of a dense 4B with two of their layers, as wide as published; GLM-4.5V's.
HYBRID = {"num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"], "vocab_size": 300}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "sparse hybrid": ("qwen3_5_moe", HYBRID),
    "dense hybrid": ("qwen3_5", HYBRID | {"hidden_size": 2560, "intermediate_size": 9216}),
    "dense": ("qwen3_vl", {"num_hidden_layers": 2, "vocab_size": 300}),
}
DELTA = {"linear_attn.in_proj_qkv", "linear_attn.in_proj_z", "linear_attn.out_proj"}
ATTENTION = {f"self_attn.{name}_proj" for name in "qkvo"}
MLP = {f"mlp.{name}_proj" for name in ("gate", "up", "down")}
SHARED = {name.replace("mlp.", "mlp.shared_expert.") for name in MLP}
DEFAULTS = {
    "sparse hybrid": DELTA | ATTENTION | SHARED | {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"},
    "dense hybrid": DELTA | ATTENTION | MLP,
    "dense": ATTENTION | MLP,
}


def skeleton(kind: str) -> Any:
    model_type, text = MODELS[kind]
    config = CONFIG_MAPPING[model_type](text_config=text, vision_config={"depth": 1, "deepstack_visual_indexes": []})
    with torch.device("meta"):
        return AutoModelForImageTextToText.from_config(config)


@pytest.mark.parametrize("kind", chosen(MODELS, lambda name: name == "sparse hybrid"))
def test_the_default_adapts_all_but_gates_and_says_the_share_of_what_it_leaves_out(kind: str) -> None:
    model, config = skeleton(kind), LoraConfig()
    targets = targets_of(model, config, ())
    names = {name.partition("layers.")[2].partition(".")[2] for name in (*targets.layers, *targets.experts)}
    assert names == DEFAULTS[kind]
    found = left_out(model, config)
    gates = {one.name for one in found if one.reason == adapter_targets.GATES}
    expected = {"linear_attn.in_proj_a", "linear_attn.in_proj_b"} if "hybrid" in kind else set()
    assert gates == expected | ({"mlp.shared_expert_gate"} if "sparse" in kind else set())
    layers = model.get_decoder().layers
    for one in found:
        of_name = [weight for name, weight in layers.named_parameters() if name.endswith(f"{one.name}.weight")]
        assert one.parameters == sum(weight.numel() for weight in of_name) > 0
    matrices = sum(weight.numel() for weight in layers.parameters() if weight.ndim > 1)
    adapted = {*targets.layers, *targets.experts}
    named = dict(model.named_parameters())
    kept = sum(named[name if name in named else f"{name}.weight"].numel() for name in adapted)
    assert matrices == kept + sum(one.parameters for one in found), "every matrix has adapters or is named"
    assert sum(one.parameters for one in found) < 0.01 * matrices
    assert left_out(model, LoraConfig(targets=("q_proj",))) == ()


def test_named_gates_and_experts_are_adapted_and_experts_are_left_out_with_dora() -> None:
    model = skeleton("sparse hybrid")
    named = targets_of(model, LoraConfig(targets=("in_proj_a", "experts.down_proj")), ())
    assert len(named.layers) == 3 and len(named.experts) == 4
    config = LoraConfig(use_dora=True)
    assert not targets_of(model, config, ()).experts
    reasons = {one.name: one.reason for one in left_out(model, config)}
    assert reasons["mlp.experts.gate_up_proj"] == adapter_targets.EXPERTS_ALONE


def test_an_unknown_target_is_answered_with_experts_too() -> None:
    with pytest.raises(ConfigError, match=r"mlp\.experts\.gate_up_proj"):
        targets_of(skeleton("sparse hybrid"), LoraConfig(targets=("w1",)), ())
