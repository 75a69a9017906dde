"""Totals of steps: read once each, in order, at most one behind, and never past a number that is none."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vlmpipe.trainer.dataloading.prefetching_loader import StepBatches
from vlmpipe.trainer.distributed.data_parallel_rank import DataParallelRank
from vlmpipe.trainer.distributed.process import ProcessContext
from vlmpipe.trainer.errors import DataError
from vlmpipe.trainer.monitoring.source_losses import SourceLosses
from vlmpipe.trainer.monitoring.step_metrics import AsyncStepMetrics, MetricsQueue
from vlmpipe.trainer.strategies.base import StepResult


def worker(device: str) -> ProcessContext:
    return ProcessContext(rank=0, world_size=1, local_rank=0, local_world_size=1, device=torch.device(device))


class Step:
    """Totals on their way."""

    def __init__(self, number: int) -> None:
        self.number = number

    def read(self) -> int:
        return self.number


@pytest.mark.parametrize(("device", "behind"), [("cuda", 1), ("cpu", 0)])
@given(all_at=st.lists(st.booleans(), max_size=20))
def test_each_step_is_read_once_in_order_and_one_is_left_on_a_gpu(device: str, behind: int, all_at: list[bool]) -> None:
    unread, read = MetricsQueue(worker(device)), []
    for number, read_all in enumerate(all_at, start=1):
        read += unread.add(Step(number), read_all=read_all)  # type: ignore[arg-type]
        expected = number if read_all else max(number - behind, len(read))
        assert read == list(range(1, expected + 1))
    assert [*read, *unread.rest()] == list(range(1, len(all_at) + 1))
    assert not unread.rest()


def pending(
    loss: float,
    norm: float,
    *,
    skipped: bool = False,
    stop: bool = False,
    save: bool = False,
    sources: SourceLosses | None = None,
) -> AsyncStepMetrics:
    """Of one process without a process group: there is nobody to sum with."""
    data = StepBatches(
        step=6, epoch=1, batches=[], global_label_tokens=10, global_loss_terms=10, useful_tokens=7, slot_tokens=8,
        images=2, sample_ids=("cat", "dog"),
    )  # fmt: skip
    result = StepResult(torch.tensor(norm), skipped=skipped)
    replica = DataParallelRank(index=0, count=1, leads=True, takes_images=True)
    return AsyncStepMetrics(
        torch.tensor(loss), result, data, stop=stop, save=save, replica=replica, worker=worker("cpu"), sources=sources
    )


@pytest.mark.parametrize(("loss", "norm", "name"), [(math.nan, 1.0, "loss"), (1.0, math.inf, "gradient norm")])
def test_non_finite_loss_names_the_step_and_its_samples(loss: float, norm: float, name: str) -> None:
    with pytest.raises(DataError, match=f"the {name} of step 7 is (nan|inf); this rank's samples: cat, dog"):
        pending(loss, norm).read()


def test_norm_of_a_skipped_step_is_ignored() -> None:
    totals = pending(2.5, math.inf, skipped=True).read()
    assert (totals.step, totals.epoch, totals.loss, totals.grad_norm) == (7, 1, 2.5, None)
    assert (totals.useful_tokens, totals.slot_tokens, totals.images, totals.samples, totals.stop) == (7, 8, 2, 2, False)


@pytest.mark.parametrize("stop", [False, True])
@pytest.mark.parametrize("save", [False, True])
def test_one_process_sums_its_own_numbers(stop: bool, save: bool) -> None:
    totals = pending(2.5, 1.5, stop=stop, save=save).read()
    assert (totals.grad_norm, totals.label_tokens, totals.stop, totals.save) == (1.5, 10, stop, save)


def test_losses_by_source_are_summed_from_micro_batches_and_begin_again() -> None:
    sources = SourceLosses(("cats", "dogs", "none"), torch.device("cpu"))
    sources.add(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1, 0, 1]))
    sources.add(torch.tensor([8.0]), torch.tensor([1]))
    totals = pending(2.5, 1.5, sources=sources).read()
    assert totals.sources == {"cats": (2.0, 1.0), "dogs": (13.0, 3.0), "none": (0.0, 0.0)}
    assert (totals.grad_norm, totals.samples) == (1.5, 2)
    assert not sources.take().any()
