from __future__ import annotations

from typing import Any

import pytest

from vlmpipe.config.yaml_loader import parse_yaml
from vlmpipe.importing.importer import import_run_file
from vlmpipe.importing.sources import command_source

MODEL = "--model_name_or_path Qwen/Qwen2.5-VL-3B-Instruct"


def run_file_of(command: str) -> dict[str, Any]:
    content: dict[str, Any] = parse_yaml(import_run_file(command_source(command)).text, "")
    return content


@pytest.mark.parametrize(
    ("command", "objective", "rate"),
    [
        (f"trl sft {MODEL}", None, 2e-5),
        (f"trl dpo {MODEL}", "dpo", 1e-6),
        (f"accelerate launch examples/scripts/dpo_vlm.py {MODEL}", "dpo", 1e-6),
        (f"python dpo.py {MODEL} --loss_type simpo --learning_rate 1e-5", "simpo", 1e-5),
        (f"trl grpo {MODEL}", None, 1e-6),
    ],
)
def test_the_program_says_the_objective(command: str, objective: str | None, rate: float) -> None:
    train = run_file_of(command)["train"]
    assert (train.get("objective"), train["optimizer"]["learning_rate"]) == (objective, rate)


def test_a_method_without_an_objective_is_refused() -> None:
    imported = import_run_file(command_source(f"trl grpo {MODEL}"))
    (program,) = [each for each in imported.findings if each.path == "program"]
    assert (program.outcome, program.reason) == ("refused", "the objectives are sft, dpo and simpo")


@pytest.mark.parametrize(
    ("command", "nodes", "gpus"),
    [
        ("CUDA_VISIBLE_DEVICES=0 python train.py", 1, 1),
        ("deepspeed --include localhost:0,1,2,3 train.py", 1, 4),
        ("FORCE_TORCHRUN=1 NNODES=2 NODE_RANK=0 NPROC_PER_NODE=4 llamafactory-cli train x.yaml", 2, 4),
        ("horovodrun -np 16 -H a:4,b:4,c:4,d:4 python train.py", 4, 4),
        ("mpirun -np 16 -x A=1 -x B -x C python train.py", 2, 8),
        ("accelerate launch --num_processes 16 --num_machines 4 train.py", 4, 4),
    ],
)
def test_machines_are_those_that_the_command_says(command: str, nodes: int, gpus: int) -> None:
    imported = import_run_file(command_source(command))
    cluster = parse_yaml(imported.text, "")["cluster"]
    assert (cluster["replica_count"], cluster["accelerator_count"]) == (nodes, gpus)
    assert cluster.get("processes_per_replica", gpus) == gpus
    assert all(word in imported.text for word in ("A=1", '"B"', '"C"') if "mpirun" in command)


def test_an_assumed_field_that_does_not_stay_is_named() -> None:
    imported = import_run_file(command_source("horovodrun -np 16 -H a:4,b:4,c:4,d:4 python train.py"))
    (launch,) = [each for each in imported.findings if each.path == "train.trainer.launch"]
    assert (launch.value, launch.outcome) == ('"horovod"', "refused")
    assert "horovod" in imported.text


def test_keys_of_weights_and_biases_are_not_copied() -> None:
    key = "0123456789abcdef" * 2 + "01234567"
    for command in (f"export WANDB_KEY={key}; torchrun t.py --wandb_key {key}",
                    f"python -c 'import wandb; wandb.login(key=\"{key}\")'"):  # fmt: skip
        assert key not in import_run_file(command_source(command)).text
