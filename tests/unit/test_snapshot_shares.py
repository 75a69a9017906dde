"""Ranks with the same state each keep a share of it in host memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from trainer.strategies.native import OnTorch, share_of
from trainer.strategies.precision import LossScale
from trainer.tracing import MemoryTracker

SIZES = st.dictionaries(st.text(min_size=1, max_size=5), st.integers(0, 1 << 30), max_size=30)


@given(SIZES, st.integers(1, 8))
def test_shares_are_a_partition_and_about_equal(sizes: dict[str, int], shares: int) -> None:
    parts = [share_of(sizes, shares, number) for number in range(shares)]
    assert sorted(name for part in parts for name in part) == sorted(sizes)
    held = [sum(sizes[name] for name in part) for part in parts]
    assert max(held) - min(held) <= max(sizes.values(), default=0)


@pytest.mark.parametrize("copies", [2, 4])
def test_a_snapshot_holds_a_share_of_weights_and_optimizer(copies: int, tmp_path: Path) -> None:
    module = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    moments = [held for state in optimizer.state.values() for held in state.values()]
    there_before = [*module.parameters(), *moments]
    whole = sum(tensor.nbytes for tensor in there_before)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.new_group()
        with MemoryTracker(there_before) as tracker:
            write = OnTorch(module, optimizer, LossScale("fp32"), copies=copies, copy=1).snapshot(tmp_path, group)
            held = tracker.held_bytes
    finally:
        dist.destroy_process_group()
    assert write
    assert held == pytest.approx(whole / copies, rel=0.05)
