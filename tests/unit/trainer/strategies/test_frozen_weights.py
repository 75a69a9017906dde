"""Ranks share the hashing of frozen weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from vlmpipe.trainer.distributed.process import ProcessContext
from vlmpipe.trainer.strategies import frozen_weights
from vlmpipe.trainer.strategies.frozen_weights import shared_sha256
from vlmpipe.trainer.weights_digest import combined_sha256, tensor_sha256

WEIGHTS = {f"layers.{number}.weight": torch.randn(3 + number, 4) for number in range(7)}
SIZES = {name: weight.numel() for name, weight in WEIGHTS.items()}


def by_ranks(weights: dict[str, Tensor], ranks: int, monkeypatch: pytest.MonkeyPatch) -> tuple[str, list[list[str]]]:
    """The digest, and which weights each rank reads. One rank after the other, before all have all parts."""
    parts: list[dict[str, str]] = []
    read: list[list[str]] = []

    def reading(name: str) -> Tensor:
        read[-1].append(name)
        return weights[name]

    def gathered(own: dict[str, str], worker: ProcessContext) -> list[dict[str, str]]:
        parts.append(own)
        return parts if worker.rank + 1 == worker.world_size else [dict.fromkeys(SIZES, "another rank's")]

    monkeypatch.setattr(frozen_weights, "together", lambda worker, doing, action: action())
    monkeypatch.setattr(frozen_weights, "gather", gathered)
    digest = ""
    for rank in range(ranks):
        read.append([])
        digest = shared_sha256(SIZES, reading, ProcessContext(rank, ranks, rank, ranks, torch.device("cpu")))
    return digest, read


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_any_number_of_ranks_gives_one_digest_and_reads_each_weight_once(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest, read = by_ranks(WEIGHTS, ranks, monkeypatch)
    assert digest == combined_sha256({name: tensor_sha256(weight) for name, weight in WEIGHTS.items()})
    assert sorted(name for names in read for name in names) == sorted(WEIGHTS)
    shares = [sum(SIZES[name] for name in names) for names in read]
    assert max(shares) - min(shares) <= max(SIZES.values())


@pytest.mark.parametrize("change", ["a value", "a type", "a shape", "a name"])
def test_it_tells_other_weights(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    digest, _ = by_ranks(WEIGHTS, 2, monkeypatch)
    name = next(iter(WEIGHTS))
    weight = WEIGHTS[name].clone()
    if change == "a value":
        weight[0, 0] += 1
    other = {"a type": weight.double(), "a shape": weight.T}.get(change, weight)
    changed = {name if change != "a name" else "other": other} | {key: WEIGHTS[key] for key in WEIGHTS if key != name}
    assert combined_sha256({key: tensor_sha256(value) for key, value in changed.items()}) != digest


def test_no_weights_have_no_digest() -> None:
    assert shared_sha256({}, WEIGHTS.__getitem__, ProcessContext(0, 1, 0, 1, torch.device("cpu"))) == ""
