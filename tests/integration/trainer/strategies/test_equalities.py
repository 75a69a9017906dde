"""The trainer's argument: five equalities, for every strategy of the table, over two real processes.

The weights are averaged too (`train.ema_decay`), which changes no loss and must be equal as they are.

The reference is one process, no accumulation, cached features, packed rows, all logits at once. Each strategy then
trains the same run on two processes with accumulation, a few labels' logits at a time, with the tower online, unpacked,
and interrupted; the losses of every step must be the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.short_form import WHOLE, chosen
from tests.support.trainer.equalities import (
    AVERAGED,
    HELD_OUT,
    NODES,
    RELATIVE,
    RELATIVE_BF16,
    STEPS,
    STOP_STEP,
    TOWER_RECOMPUTED,
    TOWER_TRAINED,
    trained_weights,
)
from tests.support.trainer.numeric_equality import EVERY_STEP, require_equal_training
from tests.support.trainer.runs import encode_features, losses, make_run, metrics, summary, train_runs
from tests.support.trainer.tiny_runs import strategy_changes
from vlmpipe.trainer.checkpoint.commit import committed
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.strategies.registry import strategy_names

WHOLE_SET_ROWS = 64  # more rows than there are samples: one step reads the whole split, packed or not
ALL_LOGITS = {"train.loss_chunk_tokens": 0}  # at once


# The short form leaves out what shares its code with one of these, or has a test of its own: test_tensor_parallel.py,
# test_pipeline_parallel.py and, of zero2, test_world_sizes.py and test_mixed_precision.py.
STRATEGIES = chosen(dict.fromkeys(strategy_names()), lambda name: name in ("ddp", "fsdp", "zero3"))
# The others share their code with one of these.
THOROUGH = chosen(dict.fromkeys(("ddp", "fsdp", "zero2", "zero3")), lambda name: name == "fsdp")
# What each format of checkpoints restores; of DDP's, over more ranks: test_exact_resume.py, of ZeRO's:
# test_mixed_precision.py.
RESUMED = chosen(STRATEGIES, lambda name: name == "fsdp")
# Features reach every engine by the same loader.
READING = chosen(THOROUGH, lambda name: name == "fsdp")
# How they are compiled: all strategies that train.compile takes.
COMPILED: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp": {"train.activation_checkpointing": "full"},
    "hsdp": {"train.activation_checkpointing": "selective"},
    "tp": {"train.sequence_parallel": True},
    "pp": {},
    "tp+pp+dp": {"train.activation_checkpointing": "full"},
    "zero1": {},
    "zero2": {"train.activation_checkpointing": "full"},
}
if not WHOLE:  # layers that FSDP shards and that are recomputed: tests/unit/trainer/models/layers/test_compile.py
    COMPILED = {}
COMPILING = {"train.compile": "on", "train.compile_backend": "aot_eager"}
RECOMPUTING: dict[str, dict[str, Any]] = chosen(
    {
        "full": {"train.activation_checkpointing": "full"},
        "selective": {"train.activation_checkpointing": "selective"},
        "offloaded": {"train.activation_checkpointing": "full", "train.activation_offloading": True},
    },
    lambda name: name == "selective",  # what is recomputed; where the rest is kept: test_tensor_parallel.py
)
KINDS = ("bf16", "fp16") if WHOLE else ("bf16",)  # of compressed gradients
# Who begins a run, and who goes on with it; test_elastic_resume.py has other pairs.
MOVES = (("fsdp", "hsdp"), ("hsdp", "ddp")) if WHOLE else ()


@dataclass(frozen=True)
class Runs:
    """Runs of one strategy by what is special about them, and what its stopped run left."""

    jobs: Mapping[str, JobConfig]
    stopped_steps: int
    stopped_checkpoints: list[str]

    def __getitem__(self, name: str) -> JobConfig:
        return self.jobs[name]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("equalities")
    encode_features(make_run(root, "features"))
    if WHOLE:
        encode_features(make_run(root, "features-bf16", {"train.precision": "bf16"}))  # in which its tower computes
    return root


@pytest.fixture(scope="module")
def reference(root: Path) -> JobConfig:
    job = make_run(root, "reference", {"train.micro_batch_size": 8, **ALL_LOGITS, **AVERAGED, **EVERY_STEP, **STEPS})
    train_runs([job], processes=1)
    return job


@pytest.fixture(scope="module")
def reference_of_tower(root: Path) -> JobConfig:
    changes = {"train.micro_batch_size": 8, **ALL_LOGITS, **TOWER_TRAINED, **EVERY_STEP, **STEPS}
    job = make_run(root, "reference-tower", changes, features="off")
    train_runs([job], processes=1)
    return job


@pytest.fixture(scope="module")
def runs_of(root: Path) -> Callable[[str], Runs]:
    """Trains the runs of strategies that share an engine, when the first test asks for one of them."""
    trained: dict[str, Runs] = {}

    def runs(strategy: str) -> Runs:
        if strategy not in trained:
            trained.update(_train(root, [name for name in STRATEGIES if _engine(name) == _engine(strategy)]))
        return trained[strategy]

    return runs


def _engine(strategy: str) -> str:
    return "deepspeed" if strategy.startswith("zero") else "torch"


def _train(root: Path, strategies: Sequence[str]) -> dict[str, Runs]:
    """As few process groups as there can be: starting one takes longer than these runs do."""
    jobs = {strategy: _jobs(root, strategy) for strategy in strategies}
    stopped = {
        strategy: make_run(root, f"{strategy}-resumed", {**_base(strategy), **AVERAGED, "train.max_steps": STOP_STEP})
        for strategy in strategies
        if strategy in RESUMED
    }
    moves = [move for move in MOVES if move[0] in strategies]
    begun = {
        move: make_run(root, "-".join(move), {**_base(move[0]), **AVERAGED, "train.max_steps": STOP_STEP})
        for move in moves
    }
    _train_by_nodes(
        {
            name: [
                *jobs[name].values(),
                *([stopped[name]] if name in stopped else []),
                *(job for move, job in begun.items() if move[0] == name),
            ]
            for name in strategies
        }
    )
    steps = {name: len(losses(job)) for name, job in stopped.items()}
    checkpoints = {name: committed(open_storage(job.run.run_uri)) for name, job in stopped.items()}
    later: dict[str, dict[str, JobConfig]] = {name: {} for name in strategies}
    for name in stopped:
        later[name]["resumed"] = make_run(root, f"{name}-resumed", _base(name) | AVERAGED)
    for move in moves:
        later[move[1]][f"from {move[0]}"] = make_run(root, "-".join(move), _base(move[1]) | AVERAGED)
    _train_by_nodes({name: list(later[name].values()) for name in strategies})
    return {name: Runs(jobs[name] | later[name], steps.get(name, 0), checkpoints.get(name, [])) for name in strategies}


def _base(strategy: str) -> dict[str, Any]:
    rows = 2 // NODES.get(strategy, 1)  # two micro-batches a step on any number of processes
    return {**strategy_changes(strategy), **STEPS, "train.micro_batch_size": rows}


def _jobs(root: Path, strategy: str) -> dict[str, JobConfig]:
    base = _base(strategy)
    validating = HELD_OUT if strategy in COMPILED else {}
    jobs = {"accumulated": make_run(root, f"{strategy}-accumulated", {**base, **AVERAGED, **validating})}
    if strategy in COMPILED:
        compiled = {
            **base,
            **AVERAGED,
            **HELD_OUT,
            **COMPILED[strategy],
            **COMPILING,
            "train.max_steps": STOP_STEP,
        }
        # Of itself it is inductor, whose kernels take minutes to make: see
        # tests/unit/trainer/models/layers/test_compile.py.
        jobs["compiled"] = make_run(root, f"{strategy}-compiled", compiled)
    if strategy == "ddp":
        jobs |= {
            f"{kind} gradients": make_run(root, f"ddp-{kind}-gradients", base | {"train.gradient_compression": kind})
            for kind in KINDS
        }
    if strategy not in THOROUGH:
        return jobs
    changes: dict[str, dict[str, Any]] = {}
    changes |= {kind: base | recomputing for kind, recomputing in RECOMPUTING.items()}
    if strategy in READING:
        jobs["online"] = make_run(root, f"{strategy}-online", base, features="off")
    if WHOLE:
        changes |= {kind: {**base, "train.precision": kind} for kind in ("bf16", "fp16")}
    jobs |= {name: make_run(root, f"{strategy}-{name}", change) for name, change in changes.items()}
    jobs["tower"] = make_run(root, f"{strategy}-tower", {**base, **TOWER_RECOMPUTED}, features="off")
    return jobs


def _train_by_nodes(jobs: Mapping[str, Sequence[JobConfig]]) -> None:
    for nodes in sorted({NODES.get(strategy, 1) for strategy, some in jobs.items() if some}):
        train_runs(
            [job for name in jobs if NODES.get(name, 1) == nodes for job in jobs[name]], processes=2, nodes=nodes
        )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strategy_equals_one_process(strategy: str, reference: JobConfig, runs_of: Callable[[str], Runs]) -> None:
    """Losses, gradients, weights and their averages. The loss does not depend on accumulation or world size."""
    job = runs_of(strategy)["accumulated"]
    assert summary(job)["world_size"] == 2 * NODES.get(strategy, 1)
    assert len(losses(reference)) > STOP_STEP
    norms = [line["grad_norm"] for line in metrics(reference)]
    assert max(norms) > reference.train.clip_grad_norm, "clipping must be active for its equality to mean anything"
    require_equal_training(job, reference)


def test_an_average_is_what_the_weights_of_each_step_give(reference: JobConfig) -> None:
    """average <- decay x average + (1 - decay) x weight, from the weights of the start on."""
    names = committed(open_storage(reference.run.run_uri))
    assert len(names) == len(losses(reference)) > STOP_STEP
    decay, average = reference.train.ema_decay, trained_weights(reference, names[0], averaged=True)
    for name in names[1:]:
        weights = trained_weights(reference, name)
        average = {key: decay * average[key] + (1 - decay) * weight for key, weight in weights.items()}
    found = trained_weights(reference, averaged=True)
    assert found.keys() == average.keys()
    for key, tensor in average.items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-5, atol=1e-6)
    assert any(not torch.allclose(found[key], weight, atol=1e-4) for key, weight in weights.items())


@pytest.mark.parametrize("strategy", READING)
def test_cached_equals_online(strategy: str, runs_of: Callable[[str], Runs]) -> None:
    runs = runs_of(strategy)
    assert (summary(runs["accumulated"])["features"], summary(runs["online"])["features"]) == ("cached", "online")
    assert losses(runs["online"]) == pytest.approx(losses(runs["accumulated"]), rel=RELATIVE)


@pytest.mark.parametrize("strategy", THOROUGH)
def test_a_trained_tower_equals_one_process(
    strategy: str, reference_of_tower: JobConfig, runs_of: Callable[[str], Runs]
) -> None:
    """Its layers behind the features get no gradient, for which DDP would wait. Recomputed, against those that were
    not."""
    require_equal_training(runs_of(strategy)["tower"], reference_of_tower)
    assert losses(reference_of_tower) != pytest.approx(losses(runs_of(strategy)["accumulated"]), rel=RELATIVE)


def test_packed_equals_unpacked(root: Path) -> None:
    """On one process: rows reach every engine by the same loader."""
    changes = {"train.global_batch_size": WHOLE_SET_ROWS, "train.micro_batch_size": 8}
    runs = {
        "packed": make_run(root, "packed", changes),
        "unpacked": make_run(root, "unpacked", changes | {"data.pack": False}),
    }
    train_runs(list(runs.values()), processes=1)
    rows = {job.run.run_id: summary(job)["tokens"] for job in (runs["packed"], runs["unpacked"])}
    assert len(set(rows.values())) == 1, "both read the same samples"
    fills = [metrics(job)[0]["fill"] for job in (runs["packed"], runs["unpacked"])]
    assert fills[0] > 2 * fills[1], "packing must have happened"
    assert losses(runs["packed"]) == pytest.approx(losses(runs["unpacked"]), rel=RELATIVE)


@pytest.mark.parametrize("strategy", THOROUGH)
def test_activation_checkpointing_and_offloading_change_no_bit(strategy: str, runs_of: Callable[[str], Runs]) -> None:
    runs = runs_of(strategy)
    for kind in RECOMPUTING:
        assert losses(runs[kind]) == losses(runs["accumulated"]), kind


@pytest.mark.parametrize("strategy", COMPILED)
def test_compiled_layers_change_no_number(strategy: str, runs_of: Callable[[str], Runs]) -> None:
    job, eager = (runs_of(strategy)[name] for name in ("compiled", "accumulated"))
    assert losses(job) == pytest.approx(losses(eager)[:STOP_STEP], rel=RELATIVE)
    validated, expected = (metrics(run)[STOP_STEP - 1]["validation_loss"] for run in (job, eager))
    assert validated == pytest.approx(expected, rel=RELATIVE)
    assert metrics(job)[-1]["compiled_graphs"] > 0


def test_a_run_file_has_layers_compiled(root: Path, reference: JobConfig) -> None:
    job = make_run(root, "compiled", {"train.micro_batch_size": 8, "train.max_steps": 2, **COMPILING})
    train_runs([job], processes=1)
    assert losses(job) == pytest.approx(losses(reference)[:2], rel=RELATIVE)
    assert metrics(job)[-1]["compiled_graphs"] > 0


@pytest.mark.parametrize("kind", KINDS)
def test_compressed_gradients_change_losses_by_their_rounding(kind: str, runs_of: Callable[[str], Runs]) -> None:
    compressed, plain = (losses(runs_of("ddp")[name]) for name in (f"{kind} gradients", "accumulated"))
    assert compressed[0] == pytest.approx(plain[0], rel=RELATIVE), "weights are those of the start"
    assert compressed == pytest.approx(plain, rel=RELATIVE_BF16)
    assert compressed != pytest.approx(plain, rel=RELATIVE / 100)


@pytest.mark.slow
def test_the_two_compressions_round_differently(runs_of: Callable[[str], Runs]) -> None:
    runs = runs_of("ddp")
    assert losses(runs["bf16 gradients"]) != pytest.approx(losses(runs["fp16 gradients"]), rel=RELATIVE / 100)


@pytest.mark.slow  # from the start, and as near: test_mixed_precision.py
@pytest.mark.parametrize("strategy", THOROUGH)
def test_bf16_stays_close_to_fp32_and_is_not_fp32(strategy: str, runs_of: Callable[[str], Runs]) -> None:
    runs = runs_of(strategy)
    assert losses(runs["bf16"]) == pytest.approx(losses(runs["accumulated"]), rel=RELATIVE_BF16)
    assert losses(runs["bf16"]) != pytest.approx(losses(runs["accumulated"]), rel=RELATIVE)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", THOROUGH)
def test_fp16_stays_close_to_fp32_and_is_not_fp32(strategy: str, runs_of: Callable[[str], Runs]) -> None:
    job = runs_of(strategy)["fp16"]
    assert metrics(job)[-1]["overflow_steps"] == 0
    assert losses(job) == pytest.approx(losses(runs_of(strategy)["accumulated"]), rel=RELATIVE_BF16 / 8)
    assert losses(job) != pytest.approx(losses(runs_of(strategy)["accumulated"]), rel=RELATIVE / 10)


@pytest.mark.parametrize("strategy", RESUMED)
def test_resumed_equals_uninterrupted(strategy: str, runs_of: Callable[[str], Runs]) -> None:
    """Bit for bit: same world size, deterministic kernels, one thread."""
    runs = runs_of(strategy)
    assert runs.stopped_steps == STOP_STEP and len(runs.stopped_checkpoints) == 1
    assert summary(runs["resumed"])["resumed_from_step"] == STOP_STEP
    assert losses(runs["resumed"]) == losses(runs["accumulated"])
    for averaged in (False, True):
        resumed, straight = (trained_weights(runs[name], averaged=averaged) for name in ("resumed", "accumulated"))
        assert all(torch.equal(resumed[name], straight[name]) for name in straight)


@pytest.mark.slow
@pytest.mark.parametrize(("begins", "goes_on"), MOVES)
def test_another_strategy_goes_on_with_the_same_losses(
    begins: str, goes_on: str, reference: JobConfig, runs_of: Callable[[str], Runs]
) -> None:
    """Sharded over two ranks, over two ranks of each of two nodes, and not at all."""
    job = runs_of(goes_on)[f"from {begins}"]
    assert summary(job)["resumed_from_step"] == STOP_STEP
    require_equal_training(job, reference)
