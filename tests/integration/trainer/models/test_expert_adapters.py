"""Adapters on experts and on gated delta rules, and experts in 4 bits, in training runs and exports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from tests.support.hf.publish import model_section, publish
from tests.support.trainer.equalities import trained_weights
from tests.support.trainer.native_models import write_data
from tests.support.trainer.runs import losses, make_run, summary, train_runs
from vlmpipe.trainer.checkpoint.sync import sync_run
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.models.layers.freeze import is_adapter
from vlmpipe.trainer.storage import open_storage

pytestmark = pytest.mark.slow

RELATIVE = 1e-5
STOP_STEP = 2
LORA = {"rank": 4, "alpha": 8.0}
QUANTIZED = {"model.lora": LORA | {"quantize_base": "nf4"}}
TWO: dict[str, dict[str, Any]] = {
    "ddp": {"train.strategy": "ddp"},
    "fsdp": {"train.strategy": "fsdp"},
    "fsdp full": {"train.strategy": "fsdp", "train.activation_checkpointing": "full"},
    "fsdp selective": {"train.strategy": "fsdp", "train.activation_checkpointing": "selective"},
    "zero2": {"train.strategy": "zero2"},
    "zero3": {"train.strategy": "zero3"},
    "quantized ddp": QUANTIZED | {"train.strategy": "ddp"},
    "quantized fsdp": QUANTIZED | {"train.strategy": "fsdp"},
    "quantized full": QUANTIZED | {"train.strategy": "fsdp", "train.activation_checkpointing": "full"},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, JobConfig]:
    root = tmp_path_factory.mktemp("runs")
    base = {
        "model": model_section(publish("qwen3_5_moe", root / "model"), lora=LORA),
        "data": {**write_data(root / "data"), "validation_fraction": 0.3},
        "features.cache": "off", "train.global_batch_size": 4, "train.micro_batch_size": 1, "train.max_steps": 4,
        "train.epochs": 4, "train.optimizer.learning_rate": 0.02,
    }  # fmt: skip
    alone = base | {"train.strategy": "ddp", "train.micro_batch_size": 4}
    one = {
        "adapted": alone,
        "quantized": alone | QUANTIZED,
        "adapter": alone | {"model.lora": LORA | {"export": "adapter"}},
    }
    made = {name: make_run(root, name, changes, features="off") for name, changes in one.items()}
    train_runs([*made.values()], processes=1)
    begun = make_run(root, "resumed", base | {"train.strategy": "fsdp", "train.max_steps": STOP_STEP}, features="off")
    for name, changes in TWO.items():
        made[name] = make_run(root, name.replace(" ", "-"), base | changes, features="off")
    for is_zero in (False, True):
        some = [made[name] for name in TWO if name.startswith("zero") == is_zero]
        train_runs(some if is_zero else [begun, *some], processes=2)
    made["resumed"] = make_run(root, "resumed", base | {"train.strategy": "fsdp"}, features="off")
    train_runs([made["resumed"]], processes=2)
    return made


@pytest.mark.parametrize("name", TWO)
def test_two_processes_equal_one(name: str, runs: Mapping[str, JobConfig]) -> None:
    expected = losses(runs["quantized" if "quantized" in name else "adapted"])
    assert len(set(expected)) == 4
    assert losses(runs[name]) == pytest.approx(expected, rel=RELATIVE)


def test_resumed_equals_uninterrupted(runs: Mapping[str, JobConfig]) -> None:
    assert summary(runs["resumed"])["resumed_from_step"] == STOP_STEP
    assert losses(runs["resumed"]) == losses(runs["fsdp"])


def test_adapters_of_experts_and_of_delta_rules_are_trained(runs: Mapping[str, JobConfig]) -> None:
    trained = {name for name, weight in trained_weights(runs["adapted"]).items() if ".lora_B." in name and weight.any()}
    for part in (
        "mlp.experts.lora_B",
        "mlp.experts.base_layer.lora_B",
        "linear_attn.in_proj_qkv",
        "out_proj",
        "in_proj_z",
    ):
        assert any(part in name for name in trained), part
    assert not any("shared_expert_gate" in name for name in trained)
    assert losses(runs["quantized"]) != losses(runs["adapted"])
    assert losses(runs["quantized"]) == pytest.approx(losses(runs["adapted"]), rel=0.05)


def test_a_merged_export_is_the_adapter_that_peft_loads_on_the_base(runs: Mapping[str, JobConfig]) -> None:
    """Of equal runs. Plain transformers and PEFT read both."""
    from peft import PeftModel

    for name in ("adapted", "adapter", "quantized"):
        sync_run(runs[name])
    merged, adapter = (open_storage(runs[name].run.run_uri).uri("export") for name in ("adapted", "adapter"))
    full: dict[str, Any] = {"dtype": torch.float32, "trust_remote_code": False}
    whole, info = AutoModelForImageTextToText.from_pretrained(merged, output_loading_info=True, **full)
    assert not any(info.values())
    assert runs["adapter"].model.pretrained
    base = AutoModelForImageTextToText.from_pretrained(runs["adapter"].model.pretrained.weights, **full)
    source = {name: weight.clone() for name, weight in base.state_dict().items()}
    model = PeftModel.from_pretrained(base, adapter)
    loaded, trained = dict(model.base_model.model.named_parameters()), trained_weights(runs["adapter"])
    assert all(torch.equal(loaded[name], weight) for name, weight in trained.items() if is_adapter(name))
    ids = torch.arange(4, 40)[None]
    with torch.no_grad():
        expected, found = (one.eval()(input_ids=ids).logits for one in (model, whole))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    changed = {name for name, weight in whole.state_dict().items() if not torch.equal(weight, source[name])}
    assert any("experts.gate_up_proj" in name for name in changed)
    assert any("experts.down_proj" in name for name in changed)
