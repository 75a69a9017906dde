"""A copy of the weights in each node (ZeRO++'s hpZ): no number changes, and it is never older than the weights.

The short form has one run of it, in test_deepspeed_settings.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.trainer.equalities import HELD_OUT, RELATIVE, STOP_STEP, TOWER_TRAINED, trained_weights
from tests.support.trainer.runs import losses, make_run, metrics, summary, train_runs
from vlmpipe.trainer.config.job import JobConfig

pytestmark = pytest.mark.slow

AVERAGED = {"train.ema_decay": 0.6}
ONLINE = {"features.cache": "off"}
# Two micro-batches a step on each of four ranks. What is validated is the average: other weights, for a while.
BASE: dict[str, Any] = {"train.strategy": "zero3", "train.micro_batch_size": 1, **ONLINE, **HELD_OUT, **AVERAGED}
NODES, RANKS = 2, 2
NODE_WEIGHTS = "train.deepspeed.zero_optimization.zero_hpz_partition_size"
STEPS = {"train.max_steps": STOP_STEP + 2}
STOPPED = {"train.max_steps": STOP_STEP}
# Whose first steps, and whose last ones, are with a copy.
MOVES = {"with to with": (True, True), "with to without": (True, False), "without to with": (False, True)}
# Each beside the same run without a copy.
OTHERS: dict[str, dict[str, Any]] = {
    "tower trained": TOWER_TRAINED,
    "adapters": {"model.lora": {"rank": 4}},
    "projector only": {"model.freeze": ["tower", "language_model"]},
    "bf16": {"train.precision": "bf16"},
    "fp16": {"train.precision": "fp16"},
    "checkpointing": {"train.activation_checkpointing": "full"},
    "offload optimizer": {"train.offload": "optimizer"},
    "offload weights": {"train.offload": "optimizer+weights"},
    "overlap": {"train.deepspeed": {"zero_optimization": {"overlap_comm": True}}},
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("node-weights")


@pytest.fixture(scope="module")
def reference(root: Path) -> JobConfig:
    job = make_run(root, "reference", {"train.micro_batch_size": 8, **ONLINE, **STEPS}, features="off")
    train_runs([job], processes=1)
    return job


@pytest.fixture(scope="module")
def runs(root: Path) -> Mapping[str, JobConfig]:
    jobs = {name: _run(root, name, copied, STEPS) for name, copied in (("without", False), ("with", True))}
    begun = [_run(root, name, first, STOPPED) for name, (first, _) in MOVES.items()]
    train_runs([*jobs.values(), *begun], processes=RANKS, nodes=NODES)
    going_on = {name: _run(root, name, then, STEPS) for name, (_, then) in MOVES.items()}
    train_runs(list(going_on.values()), processes=RANKS, nodes=NODES)
    return jobs | going_on


def _run(root: Path, name: str, copied: bool, *changes: dict[str, Any], ranks: int = RANKS) -> JobConfig:
    merged = dict(BASE)
    for change in (*changes, {NODE_WEIGHTS: ranks} if copied else {}):
        merged |= change
    return make_run(root, name.replace(" ", "-"), merged, features="off")


def _engine(job: JobConfig) -> dict[str, Any]:
    """Its `zero_optimization`, as DeepSpeed was given it."""
    return dict(json.loads(Path(job.run.run_uri, "deepspeed.json").read_text(encoding="utf-8"))["zero_optimization"])


def _require_equal(job: JobConfig, other: JobConfig) -> None:
    """To the bit: what is gathered is the same, only from nearer by."""
    assert losses(job) == losses(other)
    assert _held_out(job) == _held_out(other)
    for averaged in (False, True):
        weights, expected = (trained_weights(each, averaged=averaged) for each in (job, other))
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())


def _held_out(job: JobConfig) -> list[float]:
    return [line["validation_loss"] for line in metrics(job) if "validation_loss" in line]


def test_it_changes_no_number(runs: Mapping[str, JobConfig], reference: JobConfig) -> None:
    """Also: the average that is validated leaves nothing behind in the nodes' copies."""
    assert _engine(runs["with"]) == _engine(runs["without"]) | {"zero_hpz_partition_size": RANKS}
    assert _held_out(runs["with"]) and len(losses(reference)) > STOP_STEP
    _require_equal(runs["with"], runs["without"])
    assert losses(runs["with"]) == pytest.approx(losses(reference), rel=RELATIVE)


def test_a_resumed_run_is_the_uninterrupted_one(runs: Mapping[str, JobConfig]) -> None:
    assert summary(runs["with to with"])["resumed_from_step"] == STOP_STEP
    _require_equal(runs["with to with"], runs["with"])


@pytest.mark.parametrize("name", [name for name in MOVES if name != "with to with"])
def test_a_run_goes_on_without_it_and_one_without_goes_on_with_it(name: str, runs: Mapping[str, JobConfig]) -> None:
    assert summary(runs[name])["resumed_from_step"] == STOP_STEP
    _require_equal(runs[name], runs["with"])


@pytest.fixture(scope="module")
def others(root: Path) -> Mapping[tuple[str, bool], JobConfig]:
    jobs = {
        (name, copied): _run(root, f"{name} {copied}", copied, STOPPED, changes)
        for name, changes in OTHERS.items()
        for copied in (False, True)
    }
    listed = list(jobs.values())
    for some in (listed[:6], listed[6:12], listed[12:]):  # no group of processes may take too long
        train_runs(some, processes=RANKS, nodes=NODES)
    return jobs


@pytest.mark.parametrize("name", OTHERS)
def test_it_changes_no_number_beside(name: str, others: Mapping[tuple[str, bool], JobConfig]) -> None:
    assert "zero_hpz_partition_size" in _engine(others[name, True])
    _require_equal(others[name, True], others[name, False])


def test_ranks_that_do_not_divide_a_tensor_change_no_number(root: Path) -> None:
    """Two nodes of three: slices are filled up."""
    rows = {"train.global_batch_size": 12, **STOPPED}
    jobs = [_run(root, f"three {copied}", copied, rows, ranks=3) for copied in (True, False)]
    train_runs(jobs, processes=3, nodes=2)
    _require_equal(*jobs)


@pytest.mark.parametrize(("processes", "nodes"), [(2, 1), (1, 2)])
def test_on_one_node_or_one_rank_a_node_it_asks_for_nothing(processes: int, nodes: int, root: Path) -> None:
    named = f"few {processes} {nodes}"
    jobs = [
        _run(root, f"{named} {copied}", copied, {"train.max_steps": 2}, ranks=processes) for copied in (True, False)
    ]
    train_runs(jobs, processes=processes, nodes=nodes)
    assert _engine(jobs[0]) == _engine(jobs[1])
    assert losses(jobs[0]) == losses(jobs[1])
