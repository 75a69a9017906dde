"""Forward passes are timed on each rank, and the slowest rank is named."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor, nn

from trainer.forward_timer import ForwardTimer, straggler

SLOW_S = 0.02


class Slow(nn.Module):
    def forward(self, seconds: float) -> Tensor:
        time.sleep(seconds)
        return torch.zeros(())


def test_passes_in_training_add_up_and_others_do_not_count() -> None:
    module = Slow()
    timer = ForwardTimer(module, torch.device("cpu"))
    assert timer.seconds() == 0
    module(SLOW_S)
    module(SLOW_S)
    found = timer.seconds()
    assert 2 * SLOW_S <= found < 3 * SLOW_S + 1
    with torch.no_grad():  # validation
        module(SLOW_S)
    time.sleep(SLOW_S)  # what is between two passes
    assert timer.seconds() == found


def test_the_slowest_rank_since_the_last_line_is_named() -> None:
    before, after = [10.0, 1.0, 5.0], [11.0, 2.0, 9.0]
    assert straggler(before, after) == {"straggler_spread": pytest.approx(2.0), "slowest_rank": 2}
    assert straggler(after, after) == {}, "nothing was timed"
    assert straggler([0.0], [1.0]) == {}, "one rank has nobody to wait for"
