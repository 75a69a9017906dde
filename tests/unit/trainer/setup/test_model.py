"""What one rank does at the start for all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from vlmpipe.trainer.distributed.process import ProcessContext
from vlmpipe.trainer.setup import model as setup
from vlmpipe.trainer.weights_digest import weights_sha256


class Job:
    model = None


class Family:
    def __init__(self, tower: nn.Module | None) -> None:
        self._tower = tower

    def build_tower(self, _config: None) -> nn.Module:
        assert self._tower, "another rank than the first read the tower"
        return self._tower


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_rank_alone_reads_and_hashes_a_frozen_tower(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tower = nn.Linear(3, 2)
    expected = weights_sha256(tower)

    def on_first(worker: ProcessContext, action: Callable[[], str]) -> str:
        return action() if worker.is_first else expected

    monkeypatch.setattr(setup, "on_first", on_first)
    monkeypatch.setattr(setup, "weights_sha256", weights_sha256 if rank == 0 else None)
    worker = ProcessContext(rank, 2, rank, 2, torch.device("cpu"))
    family: Any = Family(tower if rank == 0 else None)
    job: Any = Job()
    assert setup._tower_sha256(job, family, None, worker) == expected
    assert setup._tower_sha256(job, family, tower, worker) == expected
