"""Tensor parallelism inside two copies of the model, on four real processes, against one process.

The model has all that is split in a way of its own: norms of queries and keys, a tied head over an odd number of
tokens, and a trained tower with biases. Checkpoints go from these layouts to one process and back.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.planner.memory_bounds import COUNTED, PEAK
from tests.support.planner.planned_memory import predicted
from tests.support.short_form import WHOLE, chosen
from tests.support.trainer.equalities import (
    RELATIVE,
    RELATIVE_BF16,
    STEPS,
    STOP_STEP,
    begin_in_the_middle,
    trained_weights,
)
from tests.support.trainer.hard_to_shard import MODEL
from tests.support.trainer.numeric_equality import EVERY_STEP, require_equal_training
from tests.support.trainer.runs import losses, make_run, metrics, run_ranks, summary, train_runs
from tests.support.trainer.split_memory_cases import SPLIT_CASES
from tests.support.trainer.tiny_runs import TINY, strategy_changes
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.distributed.data_parallel_rank import DataParallelRank, require_divisible
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.strategies.tensor_parallel.plan import require_shardable

PROCESSES = 4
WEIGHED = chosen(SPLIT_CASES, lambda name: name in ("tp", "tp selective"))
# Cases with selective checkpointing, and those that hold more without it. Adapters alone hold less without: products of
# frozen weights need no inputs in the backward pass, and the planner says so.
LESS = chosen(
    {"tp selective": "tp", "tp shared tokens selective": "tp shared tokens"},
    WEIGHED.__contains__,
)
ALONE = chosen(SPLIT_CASES, lambda name: name == "tp bf16 one pass")  # on two processes: one copy of the model
ADAPTED = {"model.lora": {"rank": 4, "alpha": 8.0}, "model.freeze": ["tower"]}
SHARED = {"train.sequence_parallel": True}
IN_HOST = {"train.activation_checkpointing": "full", "train.activation_offloading": True}
SELECTIVE = {"train.activation_checkpointing": "selective"}
# What else is trained: changes of the run file, and the run of one process that it equals.
OTHERS: dict[str, tuple[dict[str, Any], str]] = chosen(
    {
        "adapters": (ADAPTED, "reference adapters"),
        "shared tokens": (SHARED, "reference"),
        "shared tokens checkpointing": (SHARED | {"train.activation_checkpointing": "full"}, "reference"),
        "selective": (SELECTIVE, "reference"),
        "activations offloaded": (SHARED | IN_HOST, "reference"),
        "selective adapters": (SELECTIVE | ADAPTED, "reference adapters"),
        "shared tokens selective": (SHARED | SELECTIVE, "reference"),
        "shared tokens selective adapters": (SHARED | SELECTIVE | ADAPTED, "reference adapters"),
        "shared tokens adapters": (SHARED | ADAPTED, "reference adapters"),
        "shared tokens unpacked": (SHARED | {"data.pack": False}, "reference unpacked"),
    },
    lambda name: name == "shared tokens selective",
)
IN_THE_MIDDLE = {"train.checkpoint_every_steps": STOP_STEP}  # a checkpoint for another layout
UNPACKED = {"data.pack": False} if any("unpacked" in name for name in OTHERS) else None
# From one layout to another, and the run of one process that the whole equals.
MOVES = chosen(
    {"ddp-tp": "reference", "tp-ddp": "reference", "tp-ddp-adapters": "reference adapters"},
    lambda name: name == "tp-ddp",  # and to its own layout: test_lora.py
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tensor")


@pytest.fixture(scope="module")
def runs(root: Path) -> dict[str, JobConfig]:
    """From beginning to end, from a checkpoint of one process, and on one process from a checkpoint of several."""

    def job(run_id: str, strategy: str = "tp", **changes: Any) -> JobConfig:
        return make_run(root, run_id, {**MODEL, **STEPS, **strategy_changes(strategy), **changes}, features="off")

    has_adapters = any("adapters" in name for name in (*OTHERS, *MOVES))
    done = {"reference": job("reference", "ddp", **EVERY_STEP, **{"train.micro_batch_size": 8})}
    if has_adapters:
        done["reference adapters"] = job("reference-adapters", "ddp", **ADAPTED, **EVERY_STEP)
    if UNPACKED:
        done["reference unpacked"] = job("reference-unpacked", "ddp", **UNPACKED, **EVERY_STEP)
    train_runs(list(done.values()), processes=1)
    done["tp"] = job("tp", **IN_THE_MIDDLE)
    if "ddp-tp" in MOVES:
        done["ddp-tp"] = job("ddp-tp")
        begin_in_the_middle(done["ddp-tp"], done["reference"])
    if WHOLE:
        done["checkpointing"] = job("checkpointing", **{"train.activation_checkpointing": "full"})
        done["bf16"] = job("bf16", **{"train.precision": "bf16"})
    done |= {name: job(name.replace(" ", "-"), **changes) for name, (changes, _) in OTHERS.items()}
    if has_adapters:
        done["adapters of tp"] = job("adapters-of-tp", **ADAPTED, **IN_THE_MIDDLE)
    train_runs([one for name, one in done.items() if "reference" not in name], processes=PROCESSES)
    ended = {"tp-ddp": job("tp-ddp", "ddp")}
    begin_in_the_middle(ended["tp-ddp"], done["tp"])
    if has_adapters:
        ended["tp-ddp-adapters"] = job("tp-ddp-adapters", "ddp", **ADAPTED)
        begin_in_the_middle(ended["tp-ddp-adapters"], done["adapters of tp"])
    train_runs(list(ended.values()), processes=1)
    return done | ended


# Runs, and the runs of one process that they equal.
EQUAL = {"tp": "reference"} | {name: equal for name, (_, equal) in OTHERS.items()}


@pytest.mark.parametrize("run", EQUAL)
def test_two_copies_of_two_ranks_equal_one_process(run: str, runs: dict[str, JobConfig]) -> None:
    job, reference = runs[run], runs[EQUAL[run]]
    assert summary(job)["world_size"] == PROCESSES
    norms = [line["grad_norm"] for line in metrics(reference)]
    assert max(norms) > job.train.clip_grad_norm, "clipping must be active for its equality to mean anything"
    trained = trained_weights(reference)
    for special in ("lora_A", "lora_B") if "adapters" in run else ("q_norm", "vision_tower"):
        assert any(special in name for name in trained)
    require_equal_training(job, reference)


@pytest.mark.parametrize("run", EQUAL)
def test_their_weights_are_counted_once(run: str, runs: dict[str, JobConfig]) -> None:
    counts = [
        (summary(each)["parameters"], summary(each)["trainable_parameters"], summary(each)["tokens"])
        for each in (runs[run], runs[EQUAL[run]])
    ]
    assert counts[0] == counts[1]


@pytest.mark.slow
def test_bf16_changes_little_and_checkpointing_no_number(runs: dict[str, JobConfig]) -> None:
    straight = losses(runs["tp"])
    assert losses(runs["checkpointing"]) == pytest.approx(straight, rel=RELATIVE)
    assert losses(runs["bf16"]) == pytest.approx(straight, rel=RELATIVE_BF16)
    assert losses(runs["bf16"]) != pytest.approx(straight, rel=RELATIVE)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str], Any]:
    output: Path = tmp_path_factory.mktemp("memory") / "measured.json"
    found: dict[tuple[int, str], Any] = {}
    for processes, cases in ((PROCESSES, WEIGHED), (2, ALONE)):
        arguments = ["--output", str(output), "--cases", *cases]
        run_ranks(
            "tests.support.trainer.measure_memory", arguments, processes=processes, timeout_s=500
        )  # weighing takes its time
        found |= {(processes, name): held for name, held in json.loads(output.read_text(encoding="utf-8")).items()}
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "name"), [*((PROCESSES, name) for name in WEIGHED), *((2, name) for name in ALONE)]
)
def test_a_rank_holds_what_the_planner_says(processes: int, name: str, measured: dict[tuple[int, str], Any]) -> None:
    found, expected = measured[processes, name], predicted(SPLIT_CASES[name], processes)
    for part in ("weights", "gradients", "optimizer"):
        assert expected[part] == pytest.approx(found[part], rel=COUNTED), part
    assert expected["peak"] == pytest.approx(found["peak"], rel=PEAK)


@pytest.mark.slow
@pytest.mark.parametrize("name", LESS)
def test_selective_checkpointing_holds_less(name: str, measured: dict[tuple[int, str], Any]) -> None:
    assert measured[PROCESSES, name]["peak"] < 0.9 * measured[PROCESSES, LESS[name]]["peak"]


@pytest.mark.parametrize("run", MOVES)
def test_checkpoints_go_from_one_layout_to_another(run: str, runs: dict[str, JobConfig]) -> None:
    expected = losses(runs[MOVES[run]])
    assert summary(runs[run])["resumed_from_step"] == STOP_STEP
    assert len(losses(runs[run])) == len(expected) > STOP_STEP
    assert losses(runs[run]) == pytest.approx(expected, rel=RELATIVE)


def test_a_row_that_ranks_cannot_share_is_refused(root: Path) -> None:
    uneven = {**MODEL, **strategy_changes("tp"), **SHARED, "data.sequence_length": 255}
    job = make_run(root, "uneven", uneven, features="off")
    with pytest.raises(ConfigError, match=r"2 ranks cannot share data\.sequence_length 255"):
        require_divisible(job, DataParallelRank(index=0, count=2, leads=True, takes_images=True))


@pytest.mark.parametrize(
    ("language_model", "ranks", "said"),
    [
        ({}, 4, "does not divide the language model's key-value heads, 2"),
        ({"num_key_value_heads": 4, "intermediate_size": 66}, 4, "language model's feed-forward width, 66"),
        ({"model_type": "phi3", "pad_token_id": 0}, 2, "cannot split 'self_attn.qkv_proj' of a Phi3DecoderLayer"),
        ({"model_type": "olmo2"}, 2, "cannot split 'self_attn.q_norm' of a Olmo2DecoderLayer"),
        ({"model_type": "qwen3", "head_dim": 8}, 2, ""),
    ],
)
def test_layers_that_cannot_be_split_are_refused(language_model: dict[str, Any], ranks: int, said: str) -> None:
    """OLMo 2 norms all queries together, of which a rank has a part: it would train on wrong numbers."""
    model = {**TINY["model"], "language_model": {"config": TINY["model"]["language_model"]["config"] | language_model}}
    config = ModelConfig.model_validate(model)
    if not said:
        require_shardable(config, ranks, cached=False)
        return
    with pytest.raises(ConfigError) as refused:
        require_shardable(config, ranks, cached=False)
    assert said in str(refused.value)
