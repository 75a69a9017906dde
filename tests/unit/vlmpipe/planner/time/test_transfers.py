"""Bytes and seconds of collectives inside a node and between nodes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.planner.configs import A100_80, machine
from vlmpipe.planner.time.transfers import (
    LINK_LATENCY_S,
    LINK_SHARE,
    NIC_LATENCY_S,
    NIC_SHARE,
    RankGroup,
    seconds,
)


def test_seconds_are_bytes_over_the_reached_bandwidth() -> None:
    intra, inter = RankGroup(32, 1, ranks_per_node=8).collective("gradients", "all_reduce", 1e9, calls=3)
    node = machine(nic_gbps=100)
    at_rate_s = inter.bytes_per_nic / (12.5e9 * NIC_SHARE)
    assert seconds(inter, node, A100_80) == pytest.approx(at_rate_s + 3 * NIC_LATENCY_S)
    fast = replace(A100_80, link_gbytes_per_s=300)
    assert seconds(intra, node, fast) == pytest.approx(intra.bytes_per_rank / (300e9 * LINK_SHARE) + 3 * LINK_LATENCY_S)


def test_a_node_sends_its_sums_once_however_many_gpus_it_has() -> None:
    """Of 1,000 bytes over 4 nodes: 2 (n - 1) / n of them, shared by the node's ranks."""
    for ranks_per_node in (1, 8):
        *_, inter = RankGroup(4 * ranks_per_node, 1, ranks_per_node).collective("gradients", "all_reduce", 1000)
        assert inter.bytes_per_nic == pytest.approx(1500)
        assert inter.bytes_per_rank == pytest.approx(1500 / ranks_per_node)
