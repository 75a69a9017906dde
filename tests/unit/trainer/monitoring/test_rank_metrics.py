"""Forward passes are timed on each rank, and the slowest rank is named."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.trainer.tiny_runs import TINY
from vlmpipe.trainer.config.train import TrainConfig
from vlmpipe.trainer.monitoring import rank_metrics
from vlmpipe.trainer.monitoring.rank_metrics import ForwardTimer, StragglerWatch, straggler, waitless


class Clock:
    now_s = 100.0

    def perf_counter(self) -> float:
        return self.now_s


class Slow(nn.Module):
    """Takes as long as it is told to, by the clock."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def forward(self, seconds: float) -> Tensor:
        self.clock.now_s += seconds
        return torch.zeros(())


def test_passes_in_training_add_up_and_others_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(rank_metrics, "time", clock)
    module = Slow(clock)
    timer = ForwardTimer([module], torch.device("cpu"))
    assert timer.seconds() == 0
    module(2.0)
    module(3.0)
    assert timer.seconds() == 5
    with torch.no_grad():  # validation
        module(7.0)
    clock.now_s += 11.0  # what is between two passes
    assert timer.seconds() == 5


def test_the_slowest_rank_since_the_last_line_is_named() -> None:
    before, after = [10.0, 1.0, 5.0], [11.0, 2.0, 9.0]
    assert straggler(before, after) == {"straggler_spread": pytest.approx(2.0), "slowest_rank": 2}
    assert straggler(after, after) == {}, "nothing was timed"
    assert straggler([0.0], [1.0]) == {}, "one rank has nobody to wait for"
    timed = straggler([0.0] * 3, [0.0, 1.0, 3.0])
    assert timed == {"straggler_spread": pytest.approx(1.5), "slowest_rank": 2}, (
        "the first rank runs nothing that is timed"
    )


def test_seconds_are_by_the_number_of_modules_that_this_rank_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers of other pipeline stages are never run here."""
    clock = Clock()
    monkeypatch.setattr(rank_metrics, "time", clock)
    modules = [Slow(clock), Slow(clock), Slow(clock)]
    timer = ForwardTimer(modules, torch.device("cpu"))
    for module in modules[:2] * 3:
        module(1.0)
    assert timer.seconds() == 3


def test_where_ranks_wait_within_layers_a_linear_layer_is_timed_that_waits_for_nobody() -> None:
    """Not one that narrows, which sums over tensor parallel ranks, nor an expert's, whose tokens differ by rank."""
    layer = nn.ModuleDict(
        {
            "query": nn.Linear(8, 8),
            "up": nn.Linear(8, 24),
            "down": nn.Linear(24, 8),
            "experts": nn.ModuleList([nn.Linear(8, 99)]),
        }
    )
    settings = TrainConfig.model_validate(TINY["train"] | {"strategy": "zero3"})
    units: Any = SimpleNamespace(language_layers=[layer, layer], tower_layers=[])
    assert waitless(settings, layer, units, compiled=False) == [layer["up"], layer["up"]]
    assert waitless(settings, layer, units, compiled=True) == []


def test_a_rank_that_stays_slow_is_warned_of_once() -> None:
    watch = StragglerWatch()
    slow, other, level = (
        {"straggler_spread": spread, "slowest_rank": rank} for spread, rank in ((1.5, 3), (1.5, 1), (1.1, 3))
    )
    lines = [level] * 6 + [slow] * 4 + [other] + [slow] * 7 + [level] + [slow] * 5
    notes = [watch.note(line) for line in lines]
    assert [number for number, note in enumerate(notes) if note] == [15, 23]
    assert "1.50 times the mean" in notes[15] and watch.note({}) == ""
