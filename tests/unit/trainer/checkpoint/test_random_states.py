"""Which dropout masks ranks draw after a resume."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.trainer.checkpoints import record
from tests.support.trainer.tiny_runs import TINY, merged, strategy_changes
from vlmpipe.trainer.checkpoint.random_states import (
    have_one_layout,
    random_states,
    restore_random_states,
    seed_random_states,
)
from vlmpipe.trainer.config.train import TrainConfig
from vlmpipe.trainer.distributed.data_parallel_rank import DataParallelRank, replica_of
from vlmpipe.trainer.distributed.process import ProcessContext

RANKS = 4
STEP = 3


def workers() -> list[ProcessContext]:
    return [ProcessContext(rank, RANKS, rank, RANKS, torch.device("cpu")) for rank in range(RANKS)]


def replicas(strategy: str, **changes: int) -> list[DataParallelRank]:
    dotted = {f"train.{name}": value for name, value in changes.items()}
    config = TrainConfig.model_validate(merged(TINY, strategy_changes(strategy) | dotted)["train"])
    return [replica_of(config, worker) for worker in workers()]


def mask() -> list[float]:
    return torch.rand(8).tolist()


def reseeded(of: list[DataParallelRank], step: int = STEP) -> list[list[float]]:
    """What each rank draws after a resume from another layout."""
    drawn = []
    for replica in of:
        seed_random_states(7, replica, step=step)
        drawn.append(mask())
    return drawn


@pytest.mark.parametrize(
    ("strategy", "changes"),
    [("ddp", {}), ("fsdp", {"context_parallel": 2}), ("tp", {}), ("pp", {}), ("tp+pp+dp", {})],
)
def test_ranks_of_one_model_draw_equal_masks_and_others_do_not(strategy: str, changes: dict[str, int]) -> None:
    of = replicas(strategy, **changes)
    drawn = reseeded(of)
    for one, replica in zip(drawn, of, strict=True):
        for other, another in zip(drawn, of, strict=True):
            have_one_part_of_one_batch = (replica.index, replica.part) == (another.index, another.part)
            assert (one == other) == have_one_part_of_one_batch


def test_masks_after_a_resume_are_not_those_of_the_start() -> None:
    of = replicas("ddp")
    start, *later = (reseeded(of, step) for step in (0, 1, STEP))
    assert all(mask not in start for drawn in later for mask in drawn)


def test_in_one_layout_each_rank_goes_on_where_it_was(tmp_path: Path) -> None:
    expected = []
    for number, worker in enumerate(workers()):
        torch.manual_seed(number)
        mask()
        for file, state in random_states(worker).items():
            torch.save(state, tmp_path / file)
        expected.append(mask())
    for worker, going_on in zip(workers(), expected, strict=True):
        restore_random_states(tmp_path, worker)
        assert mask() == going_on


def test_another_number_of_ranks_or_other_degrees_are_another_layout() -> None:
    saved = record(world_size=RANKS, degrees=(2, 1, 1))
    assert have_one_layout(saved, record(world_size=RANKS, degrees=(2, 1, 1), strategy="tp"))
    for other in ({"world_size": 2}, {"degrees": (1, 2, 1)}, {"degrees": (1, 1, 1)}, {"degrees": (1, 1, 2)}):
        assert not have_one_layout(saved, record(**{"world_size": RANKS, "degrees": (2, 1, 1), **other}))  # type: ignore[arg-type]
