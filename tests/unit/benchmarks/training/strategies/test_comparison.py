"""Runs that are timed beside each other do the same work, and one that does not stops the benchmark."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks.support.report import Report, UnfairError
from benchmarks.support.tiny_run import drawn_batches
from benchmarks.training.strategies.cases import EQUAL, GROUPS, MICRO_BATCHES, ROUNDED, ROWS, TimedRun
from benchmarks.training.strategies.comparison import require_losses
from vlmpipe.trainer.strategies.registry import strategy_names

LOSSES = [4.0, 3.0, 2.0, 1.5, 1.25]
LOSSLESS = TimedRun("fsdp")
EQUAL_STEPS = 3
LOSSY = TimedRun("ddp", equal=EQUAL_STEPS)
ROUNDING = TimedRun("ddp", equal=1, rounded=ROUNDED)


def changed(step: int, by: float) -> list[float]:
    """LOSSES with one that is off by a share of itself."""
    return [loss * (1 + by) if number == step else loss for number, loss in enumerate(LOSSES)]


def test_every_strategy_of_the_table_is_timed_beside_ddp() -> None:
    groups = [group for group in GROUPS.values() if group.part == "strategies"]
    assert {group.baseline for group in groups} == {"ddp"}
    assert sorted(name for group in groups for name in group.others) == sorted({*strategy_names()} - {"ddp"})


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("quick", [False, True])
def test_runs_of_a_group_train_on_the_same_rows_of_the_same_model(name: str, quick: bool) -> None:
    group = GROUPS[name]
    cases = [run.case(group.processes, quick=quick) for run in group.runs.values()]
    configs = [case.config(group.processes) for case in cases]
    rows = {(one.train.global_batch_size, one.train.micro_batch_size, one.data.sequence_length) for one in configs}
    assert rows == {(MICRO_BATCHES * cases[0].rows.sequences, cases[0].rows.sequences, cases[0].rows.tokens)}
    assert len({one.model.model_dump_json(exclude={"lora": {"quantize_base"}}) for one in configs}) == 1
    assert len({case.vocabulary for case in cases}) == 1


@pytest.mark.parametrize(
    ("run", "losses"),
    [
        (LOSSLESS, changed(0, EQUAL / 2)),
        (LOSSLESS, changed(4, -EQUAL / 2)),
        (LOSSY, changed(EQUAL_STEPS, 0.3)),
        (ROUNDING, changed(1, ROUNDED / 2)),
    ],
)
def test_losses_within_the_law_are_compared(run: TimedRun, losses: list[float]) -> None:
    report = Report("test", {})
    require_losses(report, "a run", run, losses, LOSSES)
    assert report.checks


@pytest.mark.parametrize(
    ("run", "losses"),
    [
        (LOSSLESS, changed(0, 2 * EQUAL)),
        (LOSSLESS, changed(4, -2 * EQUAL)),
        (LOSSLESS, changed(4, math.nan)),
        (LOSSY, changed(EQUAL_STEPS - 1, 2 * EQUAL)),
        (ROUNDING, changed(0, 2 * EQUAL)),
        (ROUNDING, changed(1, 2 * ROUNDED)),
    ],
)
def test_losses_outside_of_the_law_stop_the_benchmark(run: TimedRun, losses: list[float]) -> None:
    with pytest.raises(UnfairError, match=r"a run: .* apart"):
        require_losses(Report("test", {}), "a run", run, losses, LOSSES)


def test_every_process_draws_the_same_micro_batches_and_no_two_of_them_are_equal() -> None:
    """A strategy that trained on rows of another rank would have other losses."""
    case = GROUPS["two processes"].runs["ddp"].case(2, quick=False)
    model = case.config(2).model
    steps = [drawn_batches(model, case, MICRO_BATCHES, seed=seed) for seed in (0, 1, 0)]
    for one, again in zip(steps[0], steps[2], strict=True):
        assert torch.equal(one.input_ids, again.input_ids) and torch.equal(one.images, again.images)
    batches = [*steps[0], *steps[1]]
    assert batches[0].input_ids.shape == (ROWS.sequences, ROWS.tokens)
    assert len({tuple(batch.input_ids.flatten().tolist()) for batch in batches}) == 2 * MICRO_BATCHES
    assert len({tuple(batch.images.float().flatten().tolist()) for batch in batches}) == 2 * MICRO_BATCHES
    assert len({tuple(batch.label_ids.tolist()) for batch in batches}) == 2 * MICRO_BATCHES
