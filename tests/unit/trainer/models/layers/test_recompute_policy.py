"""Recomputed layers of a trained vision encoder: they run twice, and no gradient changes. Family hf:
tests/integration/trainer/models/test_hf.py."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.trainer.flop_cases import model_config
from tests.support.trainer.tiny_native import model_section
from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.models.layers.recompute_policy import Recompute, recompute_tower
from vlmpipe.trainer.models.registry import family_of

GRIDS = [(1, 6, 10), (1, 4, 4)]  # windows of 4 x 4 patches, some of them whole
FAMILIES = ("llava", "qwen2_5_vl", "qwen3_vl")


def encoded(family_name: str, freeze: tuple[str, ...], *, recomputes: bool) -> tuple[Counter[str], dict[str, Any]]:
    """How often each layer of the encoder ran, and the gradients of encoder and projector."""
    config = ModelConfig.model_validate(model_section(family_name, freeze=freeze)) if family_name != "llava" else None
    config = config or model_config(freeze=freeze)
    family = family_of(config)
    torch.manual_seed(0)
    model = family.skeleton(config, vocabulary=300)
    for parameter in model.parameters():
        nn.init.normal_(parameter, mean=float(parameter.ndim < 2), std=0.2)
    module: Any = family.training_module(config, model, cached=False).train()
    Recompute(tower=recomputes).apply(family, module)
    ran = Counter[str]()
    for number, layer in enumerate(family.blocks(module).tower_layers):
        first = next(part for part in layer.modules() if isinstance(part, nn.Linear))
        first.register_forward_hook(lambda *_, number=number: ran.update([str(number)]))
    if family_name.startswith("qwen"):
        numbers = module.model.model.visual.patch_embed.proj.weight[0].numel()
        images, grids = torch.randn(sum(rows * columns for _, rows, columns in GRIDS), numbers), GRIDS
    else:
        side = config.image_size
        images, grids = torch.randn(2, 3, side, side), None
    module.project(module.encode(images, grids)).square().mean().backward()
    return ran, {name: weight.grad for name, weight in module.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_of_a_trained_encoder_run_twice_and_give_the_same_gradients(family: str) -> None:
    ran, expected = encoded(family, (), recomputes=False)
    twice, found = encoded(family, (), recomputes=True)
    assert ran and set(ran.values()) == {1}
    used = [name for name in ran if any(f"s.{name}." in weight for weight in expected)]  # llava leaves out the last
    assert {name: count for name, count in twice.items() if name in used} == dict.fromkeys(used, 2)
    assert found.keys() == expected.keys() and any("layers.0." in name or "blocks.0." in name for name in found)
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


def test_a_frozen_encoder_runs_once() -> None:
    ran, gradients = encoded("qwen2_5_vl", ("tower",), recomputes=True)
    assert set(ran.values()) == {1} and gradients


def test_layers_that_transformers_cannot_checkpoint_are_refused() -> None:
    with pytest.raises(ConfigError, match="Linear, a layer of this vision encoder, cannot be computed again"):
        recompute_tower([nn.Linear(2, 2)])
