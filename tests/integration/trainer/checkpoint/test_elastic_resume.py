"""Resuming on another number of processes, and under another strategy.

Rows are a function of the step alone, and the loss is a sum over all ranks: whoever continues reads the same samples
and gets the same loss, up to the order of sums.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.support.short_form import chosen
from tests.support.trainer.checkpoints import newest_good
from tests.support.trainer.equalities import STEPS, STOP_STEP, trained_weights
from tests.support.trainer.numeric_equality import EVERY_STEP, require_equal_training
from tests.support.trainer.runs import encode_features, losses, make_run, run_ranks, summary, train_runs
from vlmpipe.trainer.checkpoint.attempts import read_attempts
from vlmpipe.trainer.checkpoint.commit import committed
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.records import read_lines


class Move(NamedTuple):
    """Who begins and who goes on: strategy and processes."""

    begins: tuple[str, int]
    goes_on: tuple[str, int]

    @property
    def run_id(self) -> str:
        return "-".join(map(str, (*self.begins, *self.goes_on)))


ALL_MOVES = (
    Move(("ddp", 2), ("ddp", 4)),
    Move(("fsdp", 4), ("fsdp", 2)),
    Move(("ddp", 4), ("fsdp", 2)),
    Move(("fsdp", 2), ("ddp", 1)),
    Move(("zero2", 4), ("zero2", 2)),
    Move(("fsdp", 2), ("zero3", 4)),
    Move(("fsdp", 1), ("zero3", 2)),
    Move(("zero1", 1), ("zero1", 4)),
    Move(("zero2", 2), ("zero2", 1)),
    Move(("zero2", 1), ("zero2", 2)),
    Move(("zero3", 4), ("zero3", 2)),
    Move(("zero3", 2), ("zero1", 4)),
    Move(("zero1", 2), ("zero3", 2)),
    Move(("zero3", 4), ("fsdp", 1)),
    Move(("zero2", 4), ("ddp", 2)),
    Move(("ddp", 1), ("zero1", 2)),
)
# Fewer ranks and more, each format of checkpoints, and from one to another; of DDP alone: test_exact_resume.py.
SHORT = ("fsdp-2-ddp-1", "zero2-2-zero2-1", "fsdp-1-zero3-2")
MOVES = list(chosen({move.run_id: move for move in ALL_MOVES}, lambda name: name in SHORT).values())
# What else ZeRO keeps, or must not: averages, an embedding with two names, frozen weights under adapters.
KEPT: dict[str, dict[str, Any]] = {
    "averaged": {"train.ema_decay": 0.6},
    "tied": {"model.language_model.config.tie_word_embeddings": True},
    "adapters": {
        "model.lora": {"rank": 4, "alpha": 8.0},
        "model.language_model.config.tie_word_embeddings": True,
    },
    "offloaded": {"train.offload": "optimizer"},
    "in other partitions": {
        "train.deepspeed": {"zero_optimization": {"round_robin_gradients": True, "sub_group_size": 2000}}
    },
}
STAGES = ("zero1", "zero2", "zero3")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("elastic")
    encode_features(make_run(root, "features"))
    return root


@pytest.fixture(scope="module")
def reference(root: Path) -> JobConfig:
    job = make_run(root, "reference", EVERY_STEP | STEPS | {"train.micro_batch_size": 8})
    train_runs([job], processes=1)
    return job


@pytest.fixture(scope="module")
def moved(root: Path) -> dict[Move, JobConfig]:
    """All moves; those on the same number of processes in one process group, which is what takes the time."""
    for processes in sorted({move.begins[1] for move in MOVES}):
        moves = [move for move in MOVES if move.begins[1] == processes]
        changes = {"train.max_steps": STOP_STEP}
        train_runs([_job(root, move, move.begins[0], changes) for move in moves], processes=processes)
    jobs = {move: _job(root, move, move.goes_on[0]) for move in MOVES}
    for processes in sorted({move.goes_on[1] for move in MOVES}):
        train_runs([jobs[move] for move in MOVES if move.goes_on[1] == processes], processes=processes)
    return jobs


def _job(root: Path, move: Move, strategy: str, changes: dict[str, Any] | None = None) -> JobConfig:
    return make_run(root, move.run_id, {"train.strategy": strategy, **STEPS, **(changes or {})})


@pytest.mark.parametrize("move", MOVES, ids=lambda move: move.run_id)
def test_resumed_run_equals_that_of_one_process(move: Move, moved: dict[Move, JobConfig], reference: JobConfig) -> None:
    job = moved[move]
    said = summary(job)
    assert (said["resumed_from_step"], said["world_size"]) == (STOP_STEP, move.goes_on[1])
    assert len(losses(job)) == len(losses(reference)) > STOP_STEP
    require_equal_training(job, reference)


def test_each_start_is_counted_and_its_checkpoints_outrank_those_before(moved: dict[Move, JobConfig]) -> None:
    store = open_storage(moved[MOVES[0]].run.run_uri)
    assert read_attempts(store).attempt == 2 and read_attempts(store).ended == "done"
    assert [name.split("-")[0] for name in committed(store)] == ["0001", "0002"]


@pytest.fixture(scope="module")
def kept(root: Path) -> dict[tuple[str, str], tuple[JobConfig, JobConfig]]:
    """By stage and what is kept: a run that began on four processes and went on with two, and one on two throughout."""

    def job(name: str, stage: str, begin: str, changes: dict[str, Any]) -> JobConfig:
        return make_run(
            root, f"{stage}-{name}-{begin}".replace(" ", "-"), {"train.strategy": stage, **KEPT[name], **changes}
        )

    cases = [(name, stage) for name in KEPT for stage in STAGES]
    train_runs([job(*case, "moved", {"train.max_steps": STOP_STEP}) for case in cases], processes=4)
    jobs = {case: (job(*case, "moved", {}), job(*case, "still", EVERY_STEP)) for case in cases}
    train_runs([each for pair in jobs.values() for each in pair], processes=2, timeout_s=600)
    return jobs


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", KEPT)
def test_zero_resumes_all_that_it_keeps_on_another_number_of_processes(
    name: str, stage: str, kept: dict[tuple[str, str], tuple[JobConfig, JobConfig]]
) -> None:
    moved, still = kept[name, stage]
    assert summary(moved)["resumed_from_step"] == STOP_STEP and summary(still)["resumed_from_step"] is None
    require_equal_training(moved, still)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_zero_begins_an_average_with_the_masters_that_other_ranks_saved(stage: str, precision: str, root: Path) -> None:
    """A hardly moving average of the weights is at the end still those that were loaded."""
    settings = {"train.strategy": stage, "train.precision": precision, "features.cache": "off"}
    name = f"{stage}-{precision}-begun"
    stopped = make_run(root, name, {**settings, "train.max_steps": STOP_STEP}, features="off")
    train_runs([stopped], processes=4)
    before = trained_weights(stopped)
    job = make_run(root, name, {**settings, "train.ema_decay": 1 - 1e-9}, features="off")
    train_runs([job], processes=2)
    assert summary(job)["resumed_from_step"] == STOP_STEP
    averages, weights = trained_weights(job, averaged=True), trained_weights(job)
    for name, tensor in before.items():
        torch.testing.assert_close(averages[name], tensor, rtol=1e-5, atol=1e-7)
    assert any(not torch.allclose(weights[name], tensor, atol=1e-4) for name, tensor in before.items())


def test_another_model_is_refused_and_nothing_is_deleted(moved: dict[Move, JobConfig], root: Path) -> None:
    move = MOVES[-1]
    before = committed(open_storage(moved[move].run.run_uri))
    job = _job(root, move, "ddp", {"model.seed": 7})
    assert "model.seed changed from 0 to 7" in _refusal(job, processes=1)
    assert committed(open_storage(job.run.run_uri)) == before


def _refusal(job: JobConfig, *, processes: int) -> str:
    with pytest.raises(AssertionError) as caught:
        run_ranks("tests.support.drivers.train_many", ["--configs", f"{job.run.run_uri}/run.json"], processes=processes)
    return json.dumps(str(caught.value))


def test_training_goes_on_from_the_mirror_when_the_first_location_is_lost(root: Path) -> None:
    """Another region's bucket, say. Lost are the steps that the last line's lag names, and no more.

    What is saved after that outranks everything in the mirror.
    """
    every_step = {"train.checkpoint_every_steps": 1, "train.log_every_steps": 1}
    changes = {"checkpoint.mirror_uri": str(root / "mirror"), **every_step}
    job = make_run(root, "mirrored", {**changes, "train.max_steps": STOP_STEP})
    train_runs([job], processes=1)
    store = open_storage(job.run.run_uri)
    (*_, last) = read_lines(store, "metrics.jsonl")
    before = committed(store)
    store.delete_folder("checkpoints")
    job = make_run(root, "mirrored", changes | STEPS)
    train_runs([job], processes=1)
    resumed = summary(job)["resumed_from_step"] or 0
    assert resumed >= STOP_STEP - last["mirror_lag_steps"] and last["mirror_lag_steps"] <= STOP_STEP
    newest, _ = newest_good(store)
    assert newest is not None and newest.name > max(before)
