"""Ranks with the same state each keep a share of it in host memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed import ProcessGroup

from vlmpipe.trainer.config.train import TrainConfig
from vlmpipe.trainer.strategies.base import StepResult
from vlmpipe.trainer.strategies.torch_base import TorchStrategy, share_of
from vlmpipe.trainer.tracing.memory_tracker import MemoryTracker

SIZES = st.dictionaries(st.text(min_size=1, max_size=5), st.integers(0, 1 << 30), max_size=30)


@given(SIZES, st.integers(1, 8))
def test_shares_are_a_partition_and_about_equal(sizes: dict[str, int], shares: int) -> None:
    parts = [share_of(sizes, shares, number) for number in range(shares)]
    assert sorted(name for part in parts for name in part) == sorted(sizes)
    held = [sum(sizes[name] for name in part) for part in parts]
    assert max(held) - min(held) <= max(sizes.values(), default=0)


@pytest.fixture
def group() -> Iterator[ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.new_group()
    dist.destroy_process_group()


def settings(**changes: float) -> TrainConfig:
    content = {"global_batch_size": 1, "optimizer": {"learning_rate": 0.1}, "precision": "fp32"} | changes
    return TrainConfig.model_validate(content)


@pytest.mark.parametrize("copies", [2, 4])
def test_a_snapshot_holds_a_share_of_weights_and_optimizer(copies: int, tmp_path: Path, group: ProcessGroup) -> None:
    module = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    moments = [held for state in optimizer.state.values() for held in state.values()]
    there_before = [*module.parameters(), *moments]
    whole = sum(tensor.nbytes for tensor in there_before)
    with MemoryTracker(there_before) as tracker:
        write = TorchStrategy(module, optimizer, settings(), copies=copies, copy=1).snapshot(tmp_path, group)
        held = tracker.held.total_bytes
    assert write
    assert held == pytest.approx(whole / copies, rel=0.05)


def trained(ema_decay: float) -> tuple[nn.Module, TorchStrategy]:
    """A module after one update."""
    torch.manual_seed(0)
    module = nn.Linear(3, 2)
    strategy = TorchStrategy(
        module, optimizer := torch.optim.AdamW(module.parameters(), 0.1), settings(ema_decay=ema_decay)
    )
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    strategy.followed(StepResult(1.0))
    return module, strategy


def entries(folder: Path) -> set[str]:
    return set(dcp.FileSystemReader(folder).read_metadata().state_dict_metadata)


def test_only_an_average_that_is_kept_is_in_a_checkpoint(tmp_path: Path, group: ProcessGroup) -> None:
    for decay in (0.0, 0.5):
        trained(decay)[1].snapshot(tmp_path / str(decay), group)()
    plain, averaged = entries(tmp_path / "0.0"), entries(tmp_path / "0.5")
    assert {name.split(".")[0] for name in plain} == {"model", "optimizer"}
    assert averaged - plain == {"ema.weight", "ema.bias"} and plain <= averaged


def test_a_checkpoint_without_an_average_begins_one_with_its_weights(
    tmp_path: Path, group: ProcessGroup, capsys: pytest.CaptureFixture[str]
) -> None:
    module, before = trained(0.0)
    before.snapshot(tmp_path / "before", group)()
    expected = {name: weight.clone() for name, weight in module.state_dict().items()}
    later, strategy = trained(0.5)
    strategy.load(tmp_path / "before")
    assert "holds no average of the weights" in capsys.readouterr().out
    with strategy.averaged():
        assert all(torch.equal(weight, expected[name]) for name, weight in later.state_dict().items())


def test_a_skipped_update_leaves_the_average_as_it_is() -> None:
    module, strategy = trained(0.5)
    with strategy.averaged():
        expected = {name: weight.clone() for name, weight in module.state_dict().items()}
    with torch.no_grad():
        module.weight.zero_()
    strategy.followed(StepResult(float("inf"), skipped=True))
    with strategy.averaged():
        assert all(torch.equal(weight, expected[name]) for name, weight in module.state_dict().items())
    assert not module.weight.any(), "the weights are there again"
