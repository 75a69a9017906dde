"""The loss scale of fp16: its rule, what a step that overflows changes, and that a checkpoint holds it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vlmpipe.trainer.config.train import TrainConfig
from vlmpipe.trainer.dataloading.batches import PackedBatch
from vlmpipe.trainer.distributed.process import ProcessContext
from vlmpipe.trainer.errors import DataError
from vlmpipe.trainer.strategies.ddp import Ddp
from vlmpipe.trainer.strategies.mixed_precision import FIRST_SCALE, MAX_OVERFLOWS_IN_A_ROW, STEPS_TO_GROW, LossScale

ALONE = ProcessContext(0, 1, 0, 1, torch.device("cpu"))


class Scaled(nn.Module):
    """A weight whose gradient is the batch's first label token, which may be more than fp16 can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2))

    def forward(self, label_ids: Tensor, **_: Any) -> Tensor:
        return (self.weight.half() * label_ids.half()).float().sum()


def batch(number: float) -> PackedBatch:
    empty = torch.zeros(0)
    return PackedBatch(empty, empty, empty, torch.tensor(number), empty)


def strategy(precision: str) -> Ddp:
    settings = {"global_batch_size": 1, "optimizer": {"learning_rate": 1e-2}, "precision": precision}
    return Ddp(TrainConfig.model_validate(settings), Scaled(), ALONE)


def test_it_has_the_rule_of_torchs_scaler() -> None:
    ours = LossScale("fp16")
    theirs = torch.amp.GradScaler("cpu")
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    theirs.scale(torch.zeros(1))  # makes its state
    for number in range(2 * STEPS_TO_GROW + 10):
        overflows = number in (3, 4, 1000)
        weight.grad = torch.tensor([math.inf if overflows else 1.0])
        theirs.step(optimizer)
        theirs.update()
        assert ours.accepts(math.inf if overflows else 1.0) is not overflows
        assert ours.value == theirs.get_scale(), number
    assert ours.value != FIRST_SCALE and ours.overflows == 3


def test_other_precisions_have_no_scale_and_do_not_look_at_the_norm() -> None:
    scale = LossScale("bf16")
    norm: Any = object()  # a look at it would make the host wait for the device
    assert scale.accepts(norm) and scale.value == 1.0 and not scale.state()


def test_a_step_that_overflows_changes_no_weight_and_the_next_one_does() -> None:
    trained = strategy("fp16")
    module: Any = trained._module
    trained.forward_backward([batch(30_000.0)], 1)  # times the scale: more than fp16 has
    result = trained.step(1.0)
    assert result.skipped and trained.loss_scale.overflows == 1 and trained.loss_scale.value == FIRST_SCALE / 2
    assert torch.equal(module.weight, torch.ones(2, 2)) and not module.weight.grad.any()
    share = trained.forward_backward([batch(0.5)], 1)
    assert float(share) == 2.0, "the loss is said without the scale"
    result = trained.step(1.0)
    assert not result.skipped and float(result.grad_norm) == 1.0, "and so is the norm"
    assert not torch.equal(module.weight, torch.ones(2, 2))


def test_a_checkpoint_holds_the_scale_and_one_of_another_precision_needs_none(tmp_path: Path) -> None:
    trained = strategy("fp16")
    for number in (30_000.0, 0.5, 30_000.0, 0.5):
        trained.forward_backward([batch(number)], 1)
        trained.step(1.0)
    group: Any = None
    trained.snapshot(tmp_path / "fp16", group)()
    resumed, other = strategy("fp16"), strategy("bf16-autocast")
    resumed.load(tmp_path / "fp16")
    assert torch.equal(resumed.loss_scale.state()["loss_scale"], trained.loss_scale.state()["loss_scale"])
    assert resumed.loss_scale.value == FIRST_SCALE / 4
    other.load(tmp_path / "fp16")
    other.snapshot(tmp_path / "bf16", group)()
    resumed = strategy("fp16")
    resumed.load(tmp_path / "bf16")
    assert resumed.loss_scale.value == FIRST_SCALE


def test_a_storm_of_overflows_ends_the_run_in_words() -> None:
    scale = LossScale("fp16")
    for _ in range(MAX_OVERFLOWS_IN_A_ROW - 1):
        assert not scale.accepts(math.nan)
    with pytest.raises(DataError, match=rf"{MAX_OVERFLOWS_IN_A_ROW} steps in a row overflow fp16"):
        scale.accepts(math.inf)
