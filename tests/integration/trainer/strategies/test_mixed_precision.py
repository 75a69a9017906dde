"""`train.precision: bf16`: weights that compute are bf16, and the optimizer's fp32 masters are what is trained.

The reference is one process in the same precision. How far bf16 may be from fp32 is measured against autocast, which
rounds in matrix products only: see benchmarks/results for what drift without masters is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from tests.support.short_form import WHOLE, chosen
from tests.support.trainer.checkpoints import newest_good
from tests.support.trainer.equalities import NODES, STEPS, STOP_STEP, begin_in_the_middle, trained_weights
from tests.support.trainer.runs import encode_features, losses, make_run, summary, train_runs
from tests.support.trainer.tiny_runs import strategy_changes
from vlmpipe.trainer.checkpoint.export.hf_export import export_checkpoint
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.storage import open_storage

STRATEGIES = chosen(
    dict.fromkeys(("ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3", "tp", "pp")), lambda name: name in ("ddp", "zero2")
)
# DDP's checkpoints are those that go from one precision to another.
RESUMED = chosen(STRATEGIES, lambda name: name == "zero2")
MOVES = {"fp32 to bf16": ("fp32", "bf16"), "bf16 to fp32": ("bf16", "fp32")}
SAME_PRECISION = 5e-4  # of the loss, relative: sums in another order, rounded
MAX_DRIFT = 3.0  # times that of autocast
BF16, AVERAGED = {"train.precision": "bf16"}, {"train.ema_decay": 0.6}


@dataclass(frozen=True)
class Runs:
    one: Mapping[str, JobConfig]  # one process, by precision
    two: Mapping[str, JobConfig]  # several processes in bf16, by strategy; and moves between precisions
    resumed: Mapping[str, JobConfig]
    start: Mapping[str, Tensor]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    root = tmp_path_factory.mktemp("precision")
    for precision in ("fp32", "bf16"):  # the tower encodes in the precision of the run
        encode_features(make_run(root, f"features-{precision}", {"train.precision": precision}))
    middle = {"train.checkpoint_every_steps": STOP_STEP}
    one = {
        precision: make_run(
            root, f"one-{precision}", {"train.precision": precision, "train.micro_batch_size": 8, **STEPS, **middle}
        )
        for precision in ("fp32", "bf16-autocast", "bf16")
    }
    still = {"train.max_steps": 1, "train.optimizer.learning_rate": 1e-30, "train.optimizer.weight_decay": 0}
    start = make_run(root, "start", still)
    train_runs([*one.values(), start], processes=1)
    base = {name: strategy_changes(name) | BF16 | AVERAGED | STEPS for name in STRATEGIES}
    for name in NODES.keys() & base.keys():
        base[name]["train.micro_batch_size"] = 1
    stop = {"train.max_steps": STOP_STEP}
    two = {name: make_run(root, name, changes | middle) for name, changes in base.items()}
    moved = {
        name: make_run(root, name.replace(" ", "-"), {"train.strategy": "fsdp", "train.precision": begins} | stop)
        for name, (begins, _) in MOVES.items()
        if WHOLE  # the short form goes on with the runs of one process
    }
    train_by_nodes([*two.items(), *moved.items()])
    resumed = {name: make_run(root, f"{name}-resumed", base[name]) for name in RESUMED}
    for name in RESUMED:
        begin_in_the_middle(resumed[name], two[name])
    two |= {
        name: make_run(root, name.replace(" ", "-"), {"train.strategy": "ddp", "train.precision": ends, **STEPS})
        for name, (_, ends) in MOVES.items()
    }
    if not WHOLE:
        for name, (begins, _) in MOVES.items():
            begin_in_the_middle(two[name], one[begins])
    train_by_nodes([*resumed.items()])
    train_runs([two[name] for name in MOVES], processes=1)
    return Runs(one, two, resumed, trained_weights(start))


def train_by_nodes(jobs: Sequence[tuple[str, JobConfig]]) -> None:
    """Two processes on each of as many nodes as the strategy of that name needs."""
    for nodes in sorted({NODES.get(name, 1) for name, _ in jobs}):
        train_runs([job for name, job in jobs if NODES.get(name, 1) == nodes], processes=2, nodes=nodes)


def drift(runs: Runs, job: JobConfig) -> float:
    """Distance of a run's masters from those of fp32, as a share of the way of fp32 from the start."""
    found, expected = trained_weights(job), trained_weights(runs.one["fp32"])
    off = sum(float((found[name] - weight).square().sum()) for name, weight in expected.items())
    moved = sum(float((weight - runs.start[name]).square().sum()) for name, weight in expected.items())
    return float((off / moved) ** 0.5)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strategy_equals_one_process_in_bf16(strategy: str, runs: Runs) -> None:
    assert losses(runs.two[strategy]) == pytest.approx(losses(runs.one["bf16"]), rel=SAME_PRECISION)
    assert losses(runs.two[strategy]) != pytest.approx(losses(runs.one["fp32"]), rel=1e-5), "nothing was rounded"


@pytest.mark.parametrize("strategy", ["one process", *STRATEGIES])
def test_masters_drift_little_further_than_under_autocast(strategy: str, runs: Runs) -> None:
    job = runs.one["bf16"] if strategy == "one process" else runs.two[strategy]
    assert drift(runs, job) < MAX_DRIFT * drift(runs, runs.one["bf16-autocast"])


@pytest.mark.parametrize("strategy", RESUMED)
def test_resumed_equals_uninterrupted_bit_for_bit(strategy: str, runs: Runs) -> None:
    assert summary(runs.resumed[strategy])["resumed_from_step"] == STOP_STEP
    assert losses(runs.resumed[strategy]) == losses(runs.two[strategy])
    for averaged in (False, True):
        found, straight = (trained_weights(job[strategy], averaged=averaged) for job in (runs.resumed, runs.two))
        assert all(torch.equal(found[name], straight[name]) for name in straight)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_export_is_of_the_masters_bit_for_bit(strategy: str, runs: Runs) -> None:
    """As they are where fp32 is asked for; else each rounded once, to the type that training computed in."""
    job = runs.two[strategy]
    store = open_storage(job.run.run_uri)
    checkpoint, _ = newest_good(store)
    assert checkpoint is not None
    masters = trained_weights(job, averaged=True)
    for asked, dtype in (("auto", torch.bfloat16), ("fp32", torch.float32)):
        of_type = job.model_copy(update={"checkpoint": job.checkpoint.model_copy(update={"export_dtype": asked})})
        export_checkpoint(of_type, store, checkpoint, [])
        exported = AutoModelForImageTextToText.from_pretrained(Path(job.run.run_uri, "export"), dtype="auto")
        found = exported.state_dict()
        assert masters and all(torch.equal(found[name], tensor.to(dtype)) for name, tensor in masters.items()), asked
        assert {found[name].dtype for name in masters} == {dtype}
    assert not any(torch.equal(tensor, tensor.bfloat16().float()) for tensor in masters.values() if tensor.ndim > 1)


@pytest.mark.parametrize("name", MOVES)
def test_a_checkpoint_of_one_precision_loads_in_another(name: str, runs: Runs) -> None:
    job, (_, ends) = runs.two[name], MOVES[name]
    assert summary(job)["resumed_from_step"] == STOP_STEP
    assert losses(job) == pytest.approx(losses(runs.one[ends]), rel=2 * SAME_PRECISION)
