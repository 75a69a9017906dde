"""Parameters that tensor-parallel ranks hold whole: two ranks, in two threads with real collectives of gloo."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from vlmpipe.trainer.strategies.tensor_parallel import replicated_gradients
from vlmpipe.trainer.strategies.tensor_parallel.replicated_gradients import ReplicatedGradients

RANKS, STEPS = 2, 5


class Model(nn.Module):
    """A tower that each rank computes whole, a frozen part, and a norm of which each rank sees its heads only."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Linear(6, 5)
        self.tied = self.tower
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.heads = nn.LayerNorm(4)


def on_ranks(run: Callable[[int, ProcessGroup], Model]) -> list[Model]:
    """What each rank's thread returns."""
    store = dist.HashStore()

    def start(rank: int) -> Model:
        return run(rank, dist.ProcessGroupGloo(store, rank, RANKS))  # type: ignore[arg-type]

    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(start, range(RANKS)))


def gradients(model: Model, step: int, rank: int) -> None:
    """Equal ones on all ranks but for the last bit, as a kernel that adds in any order gives."""
    noise = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        if parameter.requires_grad:
            exact = torch.randn(parameter.shape, generator=noise)
            parameter.grad = exact if rank == 0 else torch.nextafter(exact, torch.tensor(torch.inf))


def trained(rank: int, group: ProcessGroup, *, combined: bool) -> Model:
    model = copy.deepcopy(START)
    replicated = ReplicatedGradients(model, [], group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(STEPS):
        gradients(model, step, rank)
        if combined:
            replicated.combine()
        optimizer.step()
    return model


START = Model()


def weights(model: Model) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("max_bytes", [8, 64 << 20])  # each tensor by itself, all together
def test_copies_stay_equal_though_their_gradients_differ_in_the_last_bit(
    max_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicated_gradients, "MAX_BYTES", max_bytes)
    first, second = on_ranks(lambda rank, group: trained(rank, group, combined=True))
    assert torch.equal(weights(first), weights(second))
    assert not torch.equal(weights(first), weights(START))


def test_without_it_they_drift_apart() -> None:
    first, second = on_ranks(lambda rank, group: trained(rank, group, combined=False))
    assert not torch.equal(weights(first), weights(second))


def test_equal_gradients_are_left_as_they_are_and_parts_are_summed() -> None:
    def combined(rank: int, group: ProcessGroup) -> Model:
        model = copy.deepcopy(START)
        replicated = ReplicatedGradients(model, [(model.heads, "weight")], group)
        gradients(model, 0, rank=0)
        assert model.heads.weight.grad is not None
        model.heads.weight.grad *= rank + 1
        replicated.combine()
        return model

    expected = copy.deepcopy(START)
    gradients(expected, 0, rank=0)
    assert expected.heads.weight.grad is not None
    expected.heads.weight.grad *= 1 + 2
    for model in on_ranks(combined):
        assert model.frozen.weight.grad is None
        for found, own in zip(model.parameters(), expected.parameters(), strict=True):
            assert (found.grad is None and own.grad is None) or torch.equal(found.grad, own.grad)  # type: ignore[arg-type]


def test_a_model_of_which_ranks_compute_nothing_whole_has_nothing_to_be_averaged() -> None:
    def combined(rank: int, group: ProcessGroup) -> Model:
        model = copy.deepcopy(START)
        model.tower.requires_grad_(False)
        replicated = ReplicatedGradients(model, [(model.heads, "weight"), (model.heads, "bias")], group)
        gradients(model, 0, rank=0)
        replicated.combine()
        return model

    expected = copy.deepcopy(START)
    expected.tower.requires_grad_(False)
    gradients(expected, 0, rank=0)
    assert expected.heads.weight.grad is not None
    for model in on_ranks(combined):
        assert model.heads.weight.grad is not None
        assert torch.equal(model.heads.weight.grad, 2 * expected.heads.weight.grad)
