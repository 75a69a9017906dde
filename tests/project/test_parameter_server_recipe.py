"""The server of recipes/parameter-server without RPC: what it computes, and its bound on staleness."""

from __future__ import annotations

import importlib.util
import random
import sys
from typing import Any

import pytest
import torch

from tests.support.paths import ROOT


@pytest.fixture(scope="module")
def server() -> Any:
    spec = importlib.util.spec_from_file_location("parameter_server", ROOT / "recipes/parameter-server/server.py")
    assert spec and spec.loader
    module = sys.modules["parameter_server"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def settings_of(server: Any, **changes: Any) -> Any:
    return server.Settings(**{"workers": 3, "steps": 20, "staleness": 0, "learning_rate": 0.1, **changes})


def gradients_of(number: int) -> dict[str, torch.Tensor]:
    return {"w": torch.randn(4, generator=torch.Generator().manual_seed(number))}


def test_synchronous_updates_are_those_of_one_optimizer(server: Any) -> None:
    settings = settings_of(server)
    synchronous = server.Synchronous(settings, server.Shard(settings, {"w": torch.ones(4)}), 0)
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW([weight], weight_decay=settings.weight_decay)
    for step in range(5):
        order = random.Random(step).sample(range(3), 3)
        futures = [synchronous.push(one, 3 * step + one, gradients_of(3 * step + one), 1.0, one + 1) for one in order]
        again = synchronous.push(order[0], 3 * step + order[0], gradients_of(0), 1.0, 1)  # restarted, and late
        first, second, third = (gradients_of(3 * step + one)["w"] for one in range(3))
        weight.grad = (first + second + third) * (1 / 6)
        optimizer.param_groups[0]["lr"] = settings.learning_rate_at(step)
        optimizer.step()
        for future in (*futures, again):
            assert future.value().done == 3 * (step + 1)
            assert torch.equal(future.value().parameters["w"], weight.detach())
        assert not torch.equal(synchronous.pull(3 * step)["w"], weight.detach()), "a step ago, for who lost it"


@pytest.mark.parametrize("staleness", [1, 3])
def test_no_worker_is_ever_further_ahead_than_the_bound(server: Any, staleness: int) -> None:
    """Workers of unequal speed, each of which goes on as soon as it is answered; each number is made once."""
    settings = settings_of(server, staleness=staleness, lost_after_s=1e9)
    asynchronous = server.Asynchronous(settings, server.Shard(settings, {"w": torch.ones(4)}), 0)
    for worker in range(3):
        asynchronous.join(worker)
    choose, made, ahead = random.Random(0), dict.fromkeys(range(3), 0), 0
    answers: dict[int, Any] = {}
    numbers = []
    while True:
        free = [one for one in range(3) if one not in answers or answers[one].done()]
        assert free, "all workers wait"
        worker = choose.choices(free, weights=[(20, 5, 1)[one] for one in free])[0]
        number = asynchronous.take(worker)
        if number < 0:
            break
        numbers.append(number)
        answers[worker] = asynchronous.push(worker, number, gradients_of(number), 1.0, 1)
        made[worker] += 1
        ahead = max(ahead, max(made.values()) - min(made.values()))
    assert ahead == staleness == asynchronous.max_ahead(), "reached, and never passed"
    assert sorted(numbers) == list(range(settings.micro_batches))


def test_a_lost_workers_micro_batch_is_made_by_another_and_nobody_waits_for_it(server: Any) -> None:
    settings = settings_of(server, workers=2, staleness=1, lost_after_s=5.0)
    asynchronous = server.Asynchronous(settings, server.Shard(settings, {"w": torch.ones(4)}), 0)
    for worker in range(2):
        asynchronous.join(worker)
    lost, mine = asynchronous.take(1), asynchronous.take(0)
    waits = asynchronous.push(0, mine, gradients_of(mine), 1.0, 1)
    assert not waits.done()
    assert asynchronous.left() == [lost, 2]
    later_s = max(asynchronous._seen_s.values()) + 6.0
    asynchronous._seen_s[0] = later_s
    asynchronous.release_lost(later_s)
    assert waits.done()
    assert asynchronous.take(0) == lost
    before = asynchronous.done
    assert asynchronous.push(1, lost, gradients_of(lost), 1.0, 1).done(), "of who was given up: dropped"
    assert asynchronous.done == before
