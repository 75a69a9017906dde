"""Pipeline stages x copies x ranks that split layers, on four and eight processes, and moving to and from other
layouts: always what one process computes.

What two stages on two processes do is in test_equalities.py, for all strategies alike.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.short_form import chosen
from tests.support.trainer.equalities import RELATIVE, STEPS, STOP_STEP, TOWER_TRAINED, begin_in_the_middle
from tests.support.trainer.hard_to_shard import MODEL as HARD_TO_SPLIT
from tests.support.trainer.numeric_equality import EVERY_STEP, require_equal_training
from tests.support.trainer.runs import losses, make_run, metrics, summary, train_runs
from vlmpipe.trainer.config.job import JobConfig

PAIR = {"train.strategy": "pp", "train.pipeline_parallel": 2}
TWO_BY_TWO = {**PAIR, "train.micro_batch_size": 1}
FOUR = {"train.strategy": "pp", "train.pipeline_parallel": 4}
SPLIT = {"train.strategy": "tp+pp+dp", "train.pipeline_parallel": 2, "train.tensor_parallel": 2}
INTERLEAVED = {"train.virtual_stages": 2}
TIED = {"model.language_model.config.tie_word_embeddings": True}
PROJECTOR_ONLY = {"model.freeze": ["tower", "language_model"]}
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tower": TOWER_TRAINED,
    "tied": {**TIED, "train.validate_every_steps": STOP_STEP, "train.validation_sequences": 5},
    "projector": PROJECTOR_ONLY,
    "hard to split": {**HARD_TO_SPLIT, **STEPS},
    "adapters": {"model.lora": {"rank": 4, "alpha": 8.0}},
    "uneven": {"data.max_samples": 52},  # epochs of which the last step has fewer rows
}
UNEVEN = "2 x 2 stages, uneven"
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "2 stages, 2 copies": ("plain", PAIR),
    "2 stages, 2 copies, all trained": ("tower", TWO_BY_TWO),
    "2 stages, 2 copies, tied": ("tied", TWO_BY_TWO),
    "4 stages, tied": ("tied", FOUR),
    "4 stages, three of them frozen": ("projector", FOUR),
    "4 stages, 2 micro-batches": ("uneven", {**FOUR, "train.micro_batch_size": 4}),
    UNEVEN: ("uneven", {**PAIR, **INTERLEAVED, "train.micro_batch_size": 4}),
    "2 x 2 stages, 2 copies": ("tied", {**TWO_BY_TWO, **INTERLEAVED}),
    "2 x 2 stages, 2 copies, projector": ("projector", {**TWO_BY_TWO, **INTERLEAVED}),
    "2 x 2 stages, 2 copies, uneven": ("uneven", {**TWO_BY_TWO, **INTERLEAVED}),
    "2 x 2 stages of 2 ranks": ("hard to split", {**SPLIT, **INTERLEAVED, "train.sequence_parallel": True}),
    "2 stages of 2 ranks": ("hard to split", {**SPLIT, "train.micro_batch_size": 4}),
    "2 stages of 2 ranks, adapters": ("adapters", SPLIT),
    "2 stages of 2 ranks, shared tokens": ("hard to split", {**SPLIT, "train.sequence_parallel": True}),
    "2 stages of 2 ranks, 2 copies": ("hard to split", {**SPLIT, "train.micro_batch_size": 1}),
}
PROCESSES = {"2 stages of 2 ranks, 2 copies": 8, UNEVEN: 2}  # 4 for all others
# Copies, several stages on a rank, more of them than there are micro-batches, and ranks that split a stage.
SHORT = ("2 stages, 2 copies", UNEVEN, "2 stages of 2 ranks")
RUN = chosen(CASES, SHORT.__contains__)
REFERENCES = {model: MODELS[model] for model in dict.fromkeys(model for model, _ in RUN.values())}


class Move(NamedTuple):
    """A run that goes on in the middle of another one, under another strategy and on other processes."""

    begins: str
    model: str
    changes: dict[str, Any]
    processes: int


MOVES = chosen(
    {
        "4 stages to ddp": Move("4 stages, tied", "tied", {}, 2),
        "2 stages, 2 copies, to fsdp": Move("2 stages, 2 copies", "plain", {"train.strategy": "fsdp"}, 2),
        "2 stages, 2 copies, to one process": Move("2 stages, 2 copies, all trained", "tower", {}, 1),
        "2 x 2 stages to 2 stages": Move("2 x 2 stages, 2 copies", "tied", PAIR, 2),
        "one process to 2 x 2 stages": Move("tied", "tied", {**PAIR, **INTERLEAVED}, 2),
        "one process to 2 stages": Move("tied", "tied", PAIR, 2),
        "2 stages of 2 ranks to one process": Move("2 stages of 2 ranks", "hard to split", {}, 1),
        "one process to 2 stages of 2 ranks": Move("hard to split", "hard to split", SPLIT, 4),
    },
    lambda name: name == "2 stages of 2 ranks to one process",
)


def make(root: Path, name: str, changes: dict[str, Any]) -> JobConfig:
    run_id = name.replace(", ", "-").replace(" ", "-")
    common = {"model.language_model.config.num_hidden_layers": 4, "train.checkpoint_every_steps": STOP_STEP, **STEPS}
    return make_run(root, run_id, {**common, **changes}, features="off")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, JobConfig]:
    """All runs by name. Those on the same number of processes share a process group, which is what takes the time."""
    root = tmp_path_factory.mktemp("pipeline")
    whole = {"train.micro_batch_size": 8, **EVERY_STEP}
    jobs = {model: make(root, model, {**changes, **whole}) for model, changes in REFERENCES.items()}
    train_runs(list(jobs.values()), processes=1)
    cases = {name: make(root, name, {**MODELS[model], **changes}) for name, (model, changes) in RUN.items()}
    jobs |= cases
    for processes in sorted({PROCESSES.get(name, 4) for name in cases}):
        train_runs([cases[name] for name in cases if PROCESSES.get(name, 4) == processes], processes=processes)
    moved = {name: make(root, name, {**MODELS[move.model], **move.changes}) for name, move in MOVES.items()}
    for name, move in MOVES.items():
        begin_in_the_middle(moved[name], jobs[move.begins])
    for processes in sorted({move.processes for move in MOVES.values()}):
        train_runs([moved[name] for name, move in MOVES.items() if move.processes == processes], processes=processes)
    return jobs | moved


def held_out(job: JobConfig) -> list[float]:
    return [line["validation_loss"] for line in metrics(job) if "validation_loss" in line]


def require_equal(job: JobConfig, reference: JobConfig) -> None:
    """Losses, gradients and weights; clipping must be active for its equality to mean anything."""
    assert len(losses(job)) == len(losses(reference)) > STOP_STEP
    assert held_out(job) == pytest.approx(held_out(reference), rel=RELATIVE)
    assert max(line["grad_norm"] for line in metrics(reference)) > job.train.clip_grad_norm
    require_equal_training(job, reference)


@pytest.mark.parametrize("name", RUN)
def test_stages_and_copies_equal_one_process(name: str, trained: dict[str, JobConfig]) -> None:
    model, _ = CASES[name]
    assert summary(trained[name])["world_size"] == PROCESSES.get(name, 4)
    require_equal(trained[name], trained[model])


@pytest.mark.parametrize("name", MOVES)
def test_whoever_continues_gets_the_same(name: str, trained: dict[str, JobConfig]) -> None:
    move, job = MOVES[name], trained[name]
    said = summary(job)
    assert (said["resumed_from_step"], said["world_size"]) == (STOP_STEP, move.processes)
    require_equal(job, trained[move.model])


def test_the_last_micro_batch_of_an_epoch_is_not_full(trained: dict[str, JobConfig]) -> None:
    """Else the case for it would show nothing."""
    job = trained[UNEVEN]
    rows = [
        round(line["tokens_per_s"] * line["step_s"] / line["fill"] / job.data.sequence_length) for line in metrics(job)
    ]
    assert any(number % job.train.micro_batch_size for number in rows)
