"""QLoRA: training on a quantized base equals training on its dequantized weights, in losses, adapters and export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.support.short_form import chosen
from tests.support.trainer.equalities import trained_weights
from tests.support.trainer.runs import losses, make_run, summary, train_runs
from tests.support.trainer.tiny_runs import strategy_changes
from vlmpipe.trainer.checkpoint.sync import sync_run
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.features.quantized_base.nf4 import Nf4Linear

STRATEGIES = chosen(dict.fromkeys(("ddp", "fsdp")), lambda name: name == "fsdp")
RECOMPUTING = chosen(dict.fromkeys(("full", "selective")), lambda name: name == "selective")
RELATIVE = 1e-5
STOP_STEP = 2
ADAPTED = {"train.max_steps": 4, "train.optimizer.learning_rate": 0.02, "features.cache": "off"}
LORA = {"rank": 4, "alpha": 8.0}
TEXT = {"vocab_size": 280, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A pretrained language model, and the same with the linear layers of its blocks rounded to 4 bits and back."""
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**TEXT, num_key_value_heads=2))
    folders = {name: tmp_path_factory.mktemp(name) for name in ("source", "rounded")}
    model.save_pretrained(folders["source"])
    rounded = 0
    for module in model.model.layers.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.data = Nf4Linear(module).dequantized(torch.float32)
            rounded += 1
    assert rounded == 14
    model.save_pretrained(folders["rounded"])
    return folders


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, bases: dict[str, Path]) -> dict[str, JobConfig]:
    root = tmp_path_factory.mktemp("qlora")

    def run(name: str, base: str, changes: dict[str, Any]) -> JobConfig:
        lora = LORA | ({"quantize_base": "nf4"} if base == "source" else {})
        weights = {"model.language_model": {"weights": str(bases[base])}, "model.lora": lora}
        return make_run(root, name, {**ADAPTED, **weights, **changes}, features="off")

    one = {
        "quantized": run("quantized", "source", {}),
        "dequantized": run("dequantized", "rounded", {}),
        "quantized bf16": run("quantized-bf16", "source", {"train.precision": "bf16"}),
        "dequantized bf16": run("dequantized-bf16", "rounded", {"train.precision": "bf16"}),
        **{name: run(name, "source", {"train.activation_checkpointing": name}) for name in RECOMPUTING},
    }
    train_runs(list(one.values()), processes=1)
    two = {name: run(f"{name}-two", "source", strategy_changes(name)) for name in STRATEGIES}
    stopped = {
        name: run(f"{name}-resumed", "source", {**strategy_changes(name), "train.max_steps": STOP_STEP})
        for name in STRATEGIES
    }
    train_runs([*two.values(), *stopped.values()], processes=2)
    resumed = {f"{name} resumed": run(f"{name}-resumed", "source", strategy_changes(name)) for name in STRATEGIES}
    train_runs(list(resumed.values()), processes=2)
    return {**one, **two, **resumed}


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["", " bf16"])
def test_a_quantized_base_trains_as_its_dequantized_weights_do(precision: str, runs: dict[str, JobConfig]) -> None:
    """Bit for bit, losses and adapters."""
    found, expected = runs[f"quantized{precision}"], runs[f"dequantized{precision}"]
    assert losses(found) == losses(expected)
    weights, expected_weights = trained_weights(found), trained_weights(expected)
    assert weights.keys() == expected_weights.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected_weights.items())


@pytest.mark.slow
@pytest.mark.parametrize("recomputation", RECOMPUTING)
def test_activation_checkpointing_changes_no_number(recomputation: str, runs: dict[str, JobConfig]) -> None:
    assert losses(runs[recomputation]) == pytest.approx(losses(runs["quantized"]), rel=RELATIVE)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_processes_equal_one_and_resume_exactly(strategy: str, runs: dict[str, JobConfig]) -> None:
    assert summary(runs[strategy])["world_size"] == 2
    assert losses(runs[strategy]) == pytest.approx(losses(runs["quantized"]), rel=RELATIVE)
    resumed = runs[f"{strategy} resumed"]
    assert summary(resumed)["resumed_from_step"] == STOP_STEP
    assert losses(resumed) == losses(runs[strategy])


@pytest.mark.slow
def test_the_export_is_the_model_that_was_trained(runs: dict[str, JobConfig], bases: dict[str, Path]) -> None:
    """Adapters merged into the dequantized weights, not into those of the source."""
    exports = {}
    for name in ("quantized", "dequantized"):
        sync_run(runs[name])
        exports[name] = load_file(Path(runs[name].run.run_uri, "export", "model.safetensors"))
    assert exports["quantized"].keys() == exports["dequantized"].keys()
    assert all(torch.equal(tensor, exports["dequantized"][name]) for name, tensor in exports["quantized"].items())
    source = load_file(bases["source"] / "model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    merged = exports["quantized"]["language_model.model.layers.0.mlp.up_proj.weight"]
    assert torch.linalg.matrix_rank(merged - source, atol=1e-5) > LORA["rank"], "the base is not the source's"
