"""What batch, schedule, precision and strategy of other programs mean here, by hand-computed examples."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.guides.listings import LISTINGS
from vlmpipe.config.yaml_loader import parse_yaml
from vlmpipe.importing.findings import Finding, Outcome
from vlmpipe.importing.importer import Imported, import_run_file
from vlmpipe.importing.sources import source_of

TRL = {"model_name_or_path": "Qwen/Qwen2.5-VL-3B-Instruct", "dataset_name": "a/b"}
DEEPSPEED = {"zero_optimization": {"stage": 2}}


def imported_of(content: dict[str, Any]) -> tuple[dict[str, Any], Imported]:
    imported = import_run_file(source_of(json.dumps(content), "file.json"))
    return parse_yaml(imported.text, "file"), imported


def finding_of(imported: Imported, path: str) -> Finding:
    (found,) = [each for each in imported.findings if each.path == path]
    return found


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}, (64, 4, False)),  # 4 x 2 x 8 GPUs
        ({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "packing": True}, (64, 4, True)),
        ({"gradient_accumulation_steps": 2}, (128, 8, False)),  # 8 a GPU is the default there
        ({}, (64, 8, False)),
    ],
)
def test_global_batch_is_that_of_all_ranks(given: dict[str, Any], expected: tuple[int, int, bool]) -> None:
    content, _ = imported_of(TRL | given)
    train = content["train"]
    assert (train["global_batch_size"], train["micro_batch_size"], content["data"]["pack"]) == expected


def test_a_batch_of_deepspeed_says_the_number_of_gpus() -> None:
    batch = {"train_batch_size": 128, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    content, _ = imported_of(DEEPSPEED | batch)  # 128 / 4 / 2 = 16 GPUs
    assert (content["cluster"]["replica_count"], content["cluster"]["accelerator_count"]) == (2, 8)
    assert content["train"]["global_batch_size"] == 128


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"lr_scheduler_type": "cosine", "warmup_ratio": 0.1}, {"lr_schedule": "cosine", "warmup_fraction": 0.1}),
        ({"lr_scheduler_type": "linear", "warmup_steps": 100}, {"lr_schedule": "linear", "warmup_steps": 100}),
        ({"warmup_steps": 0.1}, {"lr_schedule": "linear", "warmup_fraction": 0.1}),
        ({"lr_scheduler_type": "constant", "warmup_ratio": 0.1}, {"lr_schedule": "constant", "warmup_fraction": 0.0}),
        ({"lr_scheduler_type": "constant_with_warmup", "warmup_ratio": 0.1},
         {"lr_schedule": "constant", "warmup_fraction": 0.1}),
        ({"lr_scheduler_type": "cosine_with_min_lr", "learning_rate": 1e-4, "lr_scheduler_kwargs": {"min_lr": 1e-5}},
         {"lr_schedule": "cosine", "final_rate_fraction": 0.1}),
        ({}, {"lr_schedule": "linear", "warmup_fraction": 0.0}),  # the default there; ours is cosine with 0.03
    ],
)  # fmt: skip
def test_schedule_and_warmup_mean_the_same(given: dict[str, Any], expected: dict[str, Any]) -> None:
    content, _ = imported_of(TRL | given)
    assert content["train"].items() >= expected.items()


def test_defaults_of_the_program_are_written_where_ours_differ() -> None:
    content, imported = imported_of(TRL)
    train = content["train"]
    assert train["optimizer"] == {"learning_rate": 2e-5, "betas": [0.9, 0.999]}
    assert (train["epochs"], train["activation_checkpointing"]) == (3, "full")
    assert "the default of TRL" in imported.text


def test_deepspeed_clips_nothing_and_keeps_the_rate_by_default() -> None:
    content, _ = imported_of(DEEPSPEED)
    assert content["train"]["clip_grad_norm"] == 0.0
    assert (content["train"]["lr_schedule"], content["train"]["warmup_fraction"]) == ("constant", 0.0)


def test_bf16_false_is_fp32() -> None:
    content, imported = imported_of(TRL | {"bf16": False})
    assert content["train"]["precision"] == "fp32"
    found = finding_of(imported, "bf16")
    assert found.outcome is Outcome.CHANGED and "fp32; bf16 is faster" in found.reason


def test_fp16_becomes_bf16_where_the_gpu_has_it() -> None:
    content, imported = imported_of(TRL | {"fp16": True})
    assert content["train"]["precision"] == "bf16"
    assert "range of fp32" in finding_of(imported, "fp16").reason
    pool = {"machine_spec": {"machine_type": "n1-standard-8", "accelerator_type": "NVIDIA_TESLA_V100",
                             "accelerator_count": 1}, "replica_count": 1,
            "container_spec": {"image_uri": "us-docker.pkg.dev/p/r/i:1", "args": ["--fp16", "True"]}}  # fmt: skip
    content, _ = imported_of({"worker_pool_specs": [pool]})
    assert content["train"]["precision"] == "fp16"


@pytest.mark.parametrize(
    ("zero", "strategy", "offload"),
    [
        ({"stage": 1}, "zero1", None),
        ({"stage": 2, "offload_optimizer": {"device": "cpu"}}, "zero2", "optimizer"),
        ({"stage": 3, "offload_optimizer": {"device": "nvme"}}, "zero3", "optimizer"),
        ({"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}, "zero3",
         "optimizer+weights"),
        ({"stage": 0}, "ddp", None),
        ({"stage": 3, "offload_param": {"device": "none"}}, "zero3", None),
    ],
)  # fmt: skip
def test_stages_and_offload_are_strategies(zero: dict[str, Any], strategy: str, offload: str | None) -> None:
    content, imported = imported_of({"zero_optimization": zero, "bf16": {"enabled": True}})
    taken = content["train"].get("offload")
    assert content["train"]["strategy"] == strategy
    assert taken == offload or "sums offloaded gradients" in imported.text


@pytest.mark.parametrize(
    ("given", "strategy"),
    [
        ({"fsdp": "full_shard auto_wrap"}, "fsdp"),
        ({"fsdp": ["hybrid_shard"]}, "hsdp"),
        ({"fsdp": "shard_grad_op"}, "zero2"),
        ({"deepspeed": "configs/ds_z3_config.json"}, "zero3"),
        ({"deepspeed": "zero2.json"}, "zero2"),
    ],
)
def test_words_of_fsdp_and_names_of_files_are_strategies(given: dict[str, Any], strategy: str) -> None:
    assert imported_of(TRL | given)[0]["train"]["strategy"] == strategy


def test_adapters_leave_other_parts_frozen() -> None:
    content, _ = imported_of(
        TRL | {"use_peft": True, "lora_r": 64, "lora_alpha": 16, "lora_target_modules": "all-linear"}
    )
    assert content["model"]["lora"] == {"rank": 64, "alpha": 16, "dropout": 0.05, "targets": []}
    assert content["model"]["freeze"] == ["tower", "projector"]
    content, imported = imported_of(TRL | {"lora_r": 64})
    assert "lora" not in content["model"]
    assert finding_of(imported, "lora_r").outcome == "dropped"


def test_values_that_do_not_go_together_are_refused_in_the_words_of_check() -> None:
    content, imported = imported_of(TRL | {"optim": "adamw_bnb_8bit", "deepspeed": "z2.json"})
    assert content["train"]["strategy"] == "zero2"
    assert "name" not in content["train"]["optimizer"]
    found = finding_of(imported, "optim")
    assert found.outcome == "refused"
    assert "adamw_8bit does not work with strategy zero2" in found.reason


@pytest.mark.parametrize("epochs", [0.5, 1, 2.5])
def test_epochs_are_whole(epochs: float) -> None:
    content, imported = imported_of(TRL | {"num_train_epochs": epochs})
    assert content["train"]["epochs"] == max(1, round(epochs + 0.49))
    assert finding_of(imported, "num_train_epochs").outcome == ("expressed" if epochs == 1 else "changed")


def test_steps_come_before_epochs_as_in_transformers() -> None:
    train, _ = imported_of({"num_train_epochs": 1, "max_steps": 5000, "per_device_train_batch_size": 2})
    assert (train["train"]["max_steps"], train["train"]["epochs"]) == (5000, 1000)


def test_a_file_of_preferences_has_their_default_rate() -> None:
    train, _ = imported_of({**TRL, "loss_type": "sigmoid", "beta": 0.2})
    assert (train["train"]["objective"], train["train"]["dpo_beta"]) == ("dpo", 0.2)
    assert train["train"]["optimizer"]["learning_rate"] == 1e-6


def test_samples_of_llama_factory_are_those_of_each_data_set() -> None:
    file, _ = imported_of({"stage": "sft", "finetuning_type": "full", "dataset": "a,b,c", "max_samples": 1000})
    assert file["data"]["max_samples"] == 3000


def test_weights_are_offloaded_by_the_name_of_a_file_of_stage_3() -> None:
    train, _ = imported_of({**TRL, "deepspeed": "zero3_bf16_cpuoffload_all.json"})
    assert (train["train"]["strategy"], train["train"]["offload"]) == ("zero3", "optimizer+weights")


@pytest.mark.parametrize(
    ("params", "rate", "reason"),
    [
        ({"warmup_num_steps": 5}, 2e-5, "would rise to 0.001 without warmup_max_lr"),
        ({"warmup_max_lr": 1e-3}, 1e-3, "in place of the optimizer's 2e-05"),
        ({"warmup_max_lr": 2e-5}, 2e-5, ""),
    ],
)
def test_the_peak_of_deepspeeds_schedule_is_said(params: dict[str, Any], rate: float, reason: str) -> None:
    optimizer = {"type": "Adam", "params": {"lr": 2e-5, "bias_correction": False}}
    train, imported = imported_of({**DEEPSPEED, "optimizer": optimizer,
                                   "scheduler": {"type": "WarmupLR", "params": params}})  # fmt: skip
    assert train["train"]["optimizer"]["learning_rate"] == rate
    assert reason in " ".join(imported.text.replace("#", "").split())
    assert finding_of(imported, "optimizer.params.bias_correction").outcome == "refused"


def test_adamw_of_8_bits_brings_a_strategy_that_has_it() -> None:
    train, _ = imported_of({"optim": "paged_adamw_8bit", "per_device_train_batch_size": 2})
    assert (train["train"]["optimizer"]["name"], train["train"]["strategy"]) == ("adamw_8bit", "fsdp")


def test_reducers_give_way_to_a_strategy_without_all_reduce() -> None:
    content, imported = imported_of(json.loads(LISTINGS["E8.3-ablations"]))  # under ZeRO-3
    assert content["train"]["strategy"] == "zero3"
    assert "reduction_server" not in content["cluster"]
    (reason,) = {each.reason for each in imported.findings if each.path == "worker_pool_specs[1].replica_count"}
    assert "zero3" in reason
