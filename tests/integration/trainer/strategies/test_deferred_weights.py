"""Stored weights that are read while they are sharded: trained as by one process that builds the model whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.support.short_form import chosen
from tests.support.trainer.numeric_equality import EVERY_STEP, require_equal_training
from tests.support.trainer.runs import make_run, train_runs
from tests.support.trainer.tiny_runs import strategy_changes
from vlmpipe.trainer.config.job import JobConfig, defers_weights
from vlmpipe.trainer.config.weights.lora import LoraConfig
from vlmpipe.trainer.data.tokenize import load_tokenizer
from vlmpipe.trainer.models.layers.deferred_weights import DeferredWeights
from vlmpipe.trainer.models.registry import family_of
from vlmpipe.trainer.storage import open_storage

TEXT = {"vocab_size": 280, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
# fsdp and tp run on stored weights in test_lora.py too; of the pipelines, one whose ranks have two stages each.
RUNS = {name: strategy_changes(name) for name in ("fsdp", "tp", "pp", "zero3")}
RUNS["pp interleaved"] = RUNS["pp"] | {"train.virtual_stages": 2}
CHOSEN = chosen(RUNS, lambda name: name in ("fsdp", "pp interleaved", "zero3"))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(**TEXT, num_key_value_heads=2, tie_word_embeddings=True)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, base: Path) -> dict[str, JobConfig]:
    root = tmp_path_factory.mktemp("deferred")

    def run(name: str, changes: dict[str, Any]) -> JobConfig:
        stored = {"model.language_model": {"weights": str(base)}, "features.cache": "off", "train.max_steps": 3}
        return make_run(root, name.replace(" ", "-"), {**stored, **changes}, features="off")

    one = run("one", {"train.micro_batch_size": 8, **EVERY_STEP})
    train_runs([one], processes=1)
    two = {name: run(name, RUNS[name]) for name in CHOSEN}
    train_runs(list(two.values()), processes=2)
    return {"one": one, **two}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHOSEN)
def test_a_run_equals_that_of_a_model_that_was_built_whole(name: str, runs: dict[str, JobConfig]) -> None:
    assert defers_weights(runs[name].model, runs[name].train)
    assert not defers_weights(runs["one"].model, runs["one"].train)
    require_equal_training(runs[name], runs["one"])


@pytest.mark.slow
def test_a_filled_model_is_the_built_one(runs: dict[str, JobConfig]) -> None:
    """Weights, buffers, adapters and what is tied; and filling draws nothing from the run's random numbers."""
    job = runs["one"]
    config = job.model.model_copy(update={"lora": LoraConfig(rank=4)})
    family, tokenizer = family_of(config), load_tokenizer(open_storage(job.pointers().prepared_uri))
    built = family.build(config, tokenizer)
    deferred = family.blueprint(config, tokenizer, buffers=True)
    before = torch.get_rng_state()
    DeferredWeights(deferred, family.initial_weights(config, tokenizer), torch.device("cpu")).fill(deferred)
    assert torch.equal(torch.get_rng_state(), before)
    for kind in ("named_parameters", "named_buffers"):
        found, expected = dict(getattr(deferred, kind)()), dict(getattr(built, kind)())
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items()), kind
        assert all(found[name].requires_grad == tensor.requires_grad for name, tensor in expected.items())
