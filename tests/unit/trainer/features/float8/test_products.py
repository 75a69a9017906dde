"""Which layers multiply in 8-bit floats, and where that is refused. What they compute: test_float8.py of strategies."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.short_form import needs_torchao
from tests.support.trainer.memory_cases import Case
from vlmpipe.trainer.errors import ConfigError, ExitCode, UserError
from vlmpipe.trainer.features.float8.products import FEATURE, compute_in_float8, require_float8
from vlmpipe.trainer.models.registry import family_of

CPU, GPU = torch.device("cpu"), torch.device("cuda")
WIDE = {"model.language_model.config.hidden_size": 32, "features.cache": "off"}


def built(**changes: Any) -> tuple[Any, torch.nn.Module]:
    """Blocks and training module of a tiny model on the meta device, with its tower."""
    job = Case("ddp", WIDE | {name.replace("__", "."): value for name, value in changes.items()}).config(1)
    family = family_of(job.model)
    with torch.device("meta"):
        module = family.training_module(job.model, family.skeleton(job.model, vocabulary=300), cached=False)
    return family.blocks(module), module


def swapped(module: torch.nn.Module) -> set[str]:
    return {name for name, part in module.named_modules() if type(part).__name__ == "Float8Linear"}


@needs_torchao
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_linear_layers_of_the_language_blocks_are_swapped_and_nothing_else(recipe: Any) -> None:
    blocks, module = built()
    before = dict(module.named_parameters())
    expected = {
        name
        for name, part in module.named_modules()
        if type(part) is torch.nn.Linear
        and any(part is inner for layer in blocks.language_layers for inner in layer.modules())
    }
    assert compute_in_float8(blocks, recipe, CPU) == len(expected) > 0
    assert swapped(module) == expected
    after = dict(module.named_parameters())
    assert after.keys() == before.keys() and all(after[name] is before[name] for name in before)


@needs_torchao
def test_a_trained_tower_is_swapped_too() -> None:
    blocks, _ = built(model__freeze=[])
    compute_in_float8(blocks, "tensorwise", CPU)
    assert any(type(part).__name__ == "Float8Linear" for layer in blocks.tower_layers for part in layer.modules())


@needs_torchao
def test_adapters_stay_and_their_base_is_swapped() -> None:
    blocks, module = built(model__lora={"rank": 16})
    compute_in_float8(blocks, "tensorwise", CPU)
    names = swapped(module)
    assert names and all(name.endswith(".base_layer") for name in names)


@needs_torchao
def test_sides_that_are_no_multiples_of_16_stay() -> None:
    blocks, module = built(
        **{
            "model.language_model.config.hidden_size": 24,
            "model.language_model.config.num_attention_heads": 2,
            "model.language_model.config.num_key_value_heads": 1,
        }
    )
    with pytest.raises(ConfigError, match="multiples of 16"):
        compute_in_float8(blocks, "tensorwise", CPU)
    assert not swapped(module)


REQUIRE = pytest.mark.parametrize("require", [require_float8, FEATURE.require], ids=["layers", "before models"])


@REQUIRE
def test_without_torchao_it_says_how_to_get_it(
    require: Callable[[torch.device], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(UserError, match="torchao") as caught:
        require(CPU)
    assert caught.value.code == ExitCode.UNAVAILABLE and "vlmpipe[float8]" in caught.value.text()


@REQUIRE
def test_a_gpu_without_products_of_8_bit_floats_is_refused(
    require: Callable[[torch.device], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    with pytest.raises(ConfigError, match=r"NVIDIA A100, of compute capability 8\.0") as caught:
        require(GPU)
    assert "8.9 or newer" in caught.value.text()
