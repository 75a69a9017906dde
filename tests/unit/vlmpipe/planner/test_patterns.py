"""What patterns of distributed training send, and the docs' table of it."""

from __future__ import annotations

import math

import pytest

from tests.support.paths import ROOT
from vlmpipe.planner.patterns import (
    asynchronous_rate,
    choices,
    flat_ring_bytes,
    ring_bytes,
    server_bytes,
    servers_that_match,
    synchronous_rate,
    table,
)


def test_the_docs_have_the_table() -> None:
    assert table() in (ROOT / "docs/reference/training-patterns.md").read_text()


def test_a_ring_sends_what_a_simulated_one_sends() -> None:
    nodes, chunk_bytes = 5, 20.0
    sent = 0.0
    for _ in range(2):  # reduce-scatter, then all-gather: a chunk to the next node in each of N - 1 turns
        sent += sum(chunk_bytes for _ in range(nodes - 1))
    assert ring_bytes(nodes * chunk_bytes, nodes) == pytest.approx(sent)
    assert ring_bytes(1.0, 2) < flat_ring_bytes(1.0, 2, 8) < 2


def test_servers_match_a_ring_from_three_workers_on() -> None:
    assert servers_that_match(2) is None
    for workers in range(3, 40):
        fewest = servers_that_match(workers)
        assert fewest is not None
        assert server_bytes(1, workers, fewest) < ring_bytes(1, workers) <= server_bytes(1, workers, fewest - 1)


def test_a_slow_worker_holds_up_all_unless_staleness_has_no_bound() -> None:
    step_s = (1.0, 1.0, 1.0, 4.0)
    assert synchronous_rate(step_s) == asynchronous_rate(step_s, 8) == 1.0
    assert asynchronous_rate(step_s, math.inf) == 3.25


def test_ddp_is_cheapest_on_equal_nodes_and_asynchronous_servers_with_a_slow_one() -> None:
    machines = {"nic_gbps": 100.0, "node_usd_per_hour": 10.0, "servers": 4, "server_usd_per_hour": 1.0}
    assert choices(1e9, [1.0] * 4, **machines)[0].pattern == "ddp"  # type: ignore[arg-type]
    assert choices(1e9, [1.0, 1.0, 1.0, 4.0], **machines)[0].pattern == "servers, asynchronous"  # type: ignore[arg-type]
