"""Folders of start weights: the very model that training builds, also with the adapter that it starts from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.trainer.native_sequences import tokenizer_of
from tests.support.trainer.tiny_native import model_section
from tests.support.trainer.tiny_runs import TINY
from vlmpipe.trainer.checkpoint.export.model_folder import WithFirstAdapter, write_start
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.models.layers.lora import adapters_of
from vlmpipe.trainer.models.registry import family_of

LORA = {"rank": 4, "alpha": 8.0, "parts": ["language_model"]}


@pytest.mark.parametrize("family_name", ["qwen2_5_vl", "qwen3_vl", "smolvlm"])
@pytest.mark.parametrize("lora", [None, LORA])
def test_the_folder_holds_the_model_that_training_begins_with(
    family_name: str, lora: dict[str, Any] | None, tmp_path: Path
) -> None:
    config = ModelConfig.model_validate(model_section(family_name, lora=lora))
    family, tokenizer = family_of(config), tokenizer_of(family_name)
    built = family.build(config.model_copy(update={"lora": None}), tokenizer)
    job = JobConfig.model_validate(TINY | {"model": config, "run": {"run_id": "run", "root_uri": str(tmp_path)}})
    write_start(job, tokenizer, tmp_path / "start", torch.float32)
    loaded = family.load(tmp_path / "start").state_dict()
    assert loaded.keys() == built.state_dict().keys()
    assert all(torch.equal(loaded[name], weight) for name, weight in built.state_dict().items())


def test_an_adapter_to_start_from_is_merged_and_its_whole_modules_taken() -> None:
    config = ModelConfig.model_validate(model_section("qwen3_vl", lora=LORA))
    family, tokenizer = family_of(config), tokenizer_of("qwen3_vl")
    adapted = family.blueprint(config, tokenizer, buffers=True)
    name, adapter = next(iter(adapters_of(adapted).items()))
    values = dict(adapted.named_parameters())
    torch.nn.init.ones_(values[adapter.b])  # as a trained adapter's
    whole = "model.language_model.norm.weight"
    adapted.get_submodule("model.language_model.norm").weight = torch.nn.Parameter(torch.full((32,), 3.0))
    base = family.initial_weights(config, tokenizer)
    weights = WithFirstAdapter(base, adapted)
    assert torch.equal(weights.read(whole), torch.full((32,), 3.0))
    expected = base.read(name) + adapter.scale * values[adapter.b].detach() @ values[adapter.a].detach()
    assert torch.allclose(weights.read(name), expected) and not torch.equal(weights.read(name), base.read(name))
    untouched = "model.language_model.embed_tokens.weight"
    assert torch.equal(weights.read(untouched), base.read(untouched))
