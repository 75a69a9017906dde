"""What a run file with `train.trainer` cannot be combined with, and which of its settings the program never sees."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.pipelines.run_files import problems_of, small
from vlmpipe.config.run_config import warnings
from vlmpipe.trainer.config.weights.origin import WeightsConfig

PLAIN = {
    "name": "plain",
    "command": ["python", "train.py", "--lr", "{learning_rate}", "--batch", "{global_batch_size}"],
}
REDUCERS = {"replica_count": 1}
GPUS = {"cluster__accelerator_type": "NVIDIA_L4", "cluster__accelerator_count": 1, "cluster__replica_count": 2}


@pytest.mark.parametrize(
    ("trainer", "changes", "field"),
    [
        ({}, {"features__cache": "on"}, "features.cache"),
        ({}, {"data__train_share": 0.5}, "data.train_share"),
        ({}, {"train__early_stopping": {}, "train__validate_every_steps": 10}, "train.early_stopping"),
        ({}, {"checkpoint__export": "best", "train__validate_every_steps": 10}, "checkpoint.export"),
        (
            {"evaluate_command": ["python", "judge.py"]},
            {"data__slices": ["camera"], "data__source": "a.json"},
            "data.slices",
        ),
        ({}, {"model__lora": {}, "model__freeze": ["tower"]}, "model.lora"),
        ({"launch": "horovod"}, {"cluster__replica_count": 2}, "train.trainer.launch"),
        (
            {"launch": "tensorflow"},
            {**GPUS, "cluster__reduction_server": REDUCERS},
            "cluster.reduction_server",
        ),
        ({"command": ["python", "train.py", "{max_pixels}"]}, {}, "model.max_pixels"),
        ({"command": ["python", "train.py", "{warmup_steps}"]}, {}, "train.warmup_steps"),
        ({"command": ["python", "train.py", "{warmup_fraction}"]}, {"train__warmup_steps": 9}, "train.warmup_fraction"),
        ({"launch": "roles", "roles": {"ps": 1}}, {}, "train.trainer.roles.ps"),
        (
            {"launch": "roles", "roles": {"evaluator": 1}},
            {"cluster__replica_count": 2},
            "train.trainer.roles.evaluator",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(trainer: dict[str, Any], changes: dict[str, Any], field: str) -> None:
    assert field in problems_of(train__trainer={**PLAIN, **trainer}, **changes)


def test_our_evaluation_of_a_programs_model_has_slices() -> None:
    config = small(train__trainer=PLAIN, data__slices=["camera"], data__source="a.json")
    assert "data.slices" not in {problem.field for problem in warnings(config)}


def test_settings_that_no_placeholder_reads_are_named() -> None:
    config = small(train__trainer=PLAIN, train__epochs=3, train__optimizer__weight_decay=0.1, train__seed=1)
    fields = {problem.field for problem in warnings(config)}
    assert {"train.epochs", "train.optimizer.weight_decay", "train.seed"} <= fields
    assert not {"train.trainer", "train.optimizer.learning_rate", "train.global_batch_size"} & fields


def test_a_warmup_in_steps_is_told_to_the_program_alone() -> None:
    trainer = {**PLAIN, "command": [*PLAIN["command"], "{warmup_steps}"]}
    config = small(train__trainer=trainer, train__warmup_steps=9)
    assert not {"train.warmup_steps", "train.warmup_fraction"} & {problem.field for problem in warnings(config)}


@pytest.mark.parametrize(("weights", "named"), [("org/model", True), ("gs://bucket/model", False)])
def test_a_revision_that_the_program_is_not_told_is_named(weights: str, named: bool) -> None:
    config = small(train__trainer=PLAIN)
    pretrained = WeightsConfig(weights=weights, revision="0123abcd")
    model = config.model.model_copy(update={"pretrained": pretrained})
    fields = {problem.field for problem in warnings(config.model_copy(update={"model": model}))}
    assert ("model.pretrained.revision" in fields) == named


@pytest.mark.parametrize(("launch", "advised"), [("torchrun", True), ("tensorflow", False), ("roles", False)])
def test_only_collectives_need_all_nodes_restarted(launch: str, advised: bool) -> None:
    config = small(train__trainer={**PLAIN, "launch": launch}, cluster__replica_count=2)
    fields = {problem.field for problem in warnings(config)}
    assert ("cluster.restart_job_on_worker_restart" in fields) == advised


SHELL = ["bash", "-c", "torchrun --nproc_per_node=2 --nnodes=$NNODES --master_addr=$MASTER_ADDR t.py"]


@pytest.mark.parametrize(
    ("command", "doubts"),
    [
        (["torchrun", "--nproc_per_node=2", "--nnodes=2", "--node_rank=$NODE_RANK", "t.py"], ["$NODE_RANK, which no"]),
        (
            ["torchrun", "--nproc_per_node=4", "t.py"],
            ["4 --nproc_per_node on 2 processes of a node", "no --nnodes on 2 nodes; expected all 2: torchrun starts"],
        ),
        (["torchrun", "t.py", "--nnodes", "8"], ["torchrun starts one process", "--nnodes 8"]),
        (["torchrun", "--nproc-per-node", "gpu", "--nnodes=2", "--node_rank", "0", "t.py"], ["--node_rank 0"]),
        (["torchrun", "--nproc_per_node=2", "--nnodes=2", "--master_addr=1.0.0.2", "t.py"], ["--master_addr 1.0.0.2"]),
        (["deepspeed", "--num_gpus", "8", "t.py"], ["deepspeed --num_gpus 8 on 2 x 2", "no --hostfile on 2 nodes"]),
        (
            ["accelerate", "launch", "--num_processes=2", "t.py"],
            ["accelerate --num_processes 2 on 2 x 2", "no --num_machines on 2 nodes"],
        ),
        (["accelerate", "launch", "--num_processes=4", "--num_machines=2", "t.py", "--num_processes", "9"], []),
        (["mpirun", "-np", "3", "python", "t.py", "-n", "4"], ["mpirun -np 3 on 2 x 2"]),
        (SHELL, []),
        (["bash", "-c", 'torchrun "${ARGS[@]}" t.py'], []),
        (["bash", "-c", "torchrun --nnodes $N t.py $ARGS"], ["torchrun starts one process"]),
        (["bash", "-e", "-u", "-o", "pipefail", *SHELL[1:]], []),
        (["python", "t.py", "--node_rank", "0"], []),
        (["python", "t.py", "--strategy", "deepspeed"], []),
    ],
)
def test_a_launchers_words_are_compared_with_the_nodes(command: list[str], doubts: list[str]) -> None:
    trainer = {"name": "plain", "launch": "self", "command": command}
    config = small(train__trainer=trainer, cluster__replica_count=2, cluster__processes_per_replica=2)
    found = [one.text for one in warnings(config) if one.field == "train.trainer.command"]
    assert len(found) == len(doubts)
    assert all(doubt in text for doubt, text in zip(doubts, found, strict=True))


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (SHELL, False),
        ([*SHELL[:2], 'python t.py "$@"', "sh"], True),
        ([*SHELL[:2], "python t.py $*", "sh"], True),
        ([*SHELL[:2], 'python t.py "$@"'], False),  # the first one would be $0
    ],
)
def test_arguments_of_a_resume_must_pass_a_shells_text(command: list[str], told: bool) -> None:
    trainer = {"name": "plain", "launch": "self", "command": command, "resume_args": ["--resume", "{resume}"]}
    fields = {one.field for one in warnings(small(train__trainer=trainer))}
    assert ("train.trainer.resume_args" not in fields) == told
