"""Reduction Server: who may have one, how many reducers, and whether they pay."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.planner.configs import A100_80, LLAVA_7B, RoundPrices, machine, run_config
from vlmpipe.catalog.machines import reducers_needed
from vlmpipe.planner.parallel_layout import STRATEGIES, layout_of, make_layout
from vlmpipe.planner.scenario import Scenario
from vlmpipe.planner.time.reduction_server import ELIGIBLE, Advice, advise, all_reduce_gain, step_gain
from vlmpipe.planner.time.step_time import Time, estimate_time
from vlmpipe.planner.workload import Workload

SLOW = machine(nic_gbps=100)


def advised(prices: RoundPrices | None = None, *, node: Any = SLOW, exposed: float | None = None, **run: Any) -> Advice:
    """Advice on a run of four nodes; `exposed` replaces the share of the step that waits for the network."""
    config = run_config(**{"cluster__replica_count": 4, "train__strategy": "ddp"} | run)
    layout = layout_of(config)
    gpu = A100_80 if config.cluster.accelerator_count else None
    time = estimate_time(Scenario(config, LLAVA_7B, layout, Workload.assumed(config, LLAVA_7B), node, gpu))
    if exposed is not None and time.step_s is not None:
        time = replace(time, exposed_all_reduce_s=exposed * time.step_s)
    return advise(config, layout, time, node, prices or RoundPrices())


@pytest.mark.parametrize(("nodes", "gbps", "reducers"), [(8, 100, 25), (5, 100, 16), (4, 100, 13), (2, 32, 2)])
def test_reducers_match_the_nodes_bandwidth(nodes: int, gbps: float, reducers: int) -> None:
    assert reducers_needed(nodes, gbps) == reducers


@pytest.mark.parametrize(("nodes", "gain"), [(2, 1.0), (3, 4 / 3), (4, 1.5), (8, 1.75)])
def test_gain_of_enough_reducers(nodes: int, gain: float) -> None:
    assert all_reduce_gain(nodes, 100, reducers_needed(nodes, 100)) == pytest.approx(gain)


def test_too_few_reducers_cap_the_cluster() -> None:
    assert all_reduce_gain(4, 100, 2) == pytest.approx(1.5 * 64 / 400)


@given(st.integers(2, 64), st.sampled_from([10, 32, 100, 200]), st.integers(1, 500))
def test_gain_never_reaches_two(nodes: int, gbps: float, reducers: int) -> None:
    assert 0 < all_reduce_gain(nodes, gbps, reducers) < 2


@given(st.floats(0, 1), st.floats(1, 2))
def test_a_step_gains_at_most_what_the_network_does(share: float, gain: float) -> None:
    assert 1 - 1e-9 <= step_gain(share, gain) <= gain + 1e-9


def test_it_pays_when_the_network_is_the_bottleneck() -> None:
    advice = advised(exposed=0.4)
    assert advice.state == "pays"
    assert advice.reducers == 13
    assert advice.speedup == pytest.approx(1 / (1 - 0.4 + 0.4 / 1.5))
    assert advice.extra_usd_per_hour == pytest.approx(13 * 0.5)
    assert advice.saved_usd_per_hour == pytest.approx(4 * 40 * (advice.speedup - 1))


def test_it_does_not_pay_when_reducers_cost_more_than_they_save() -> None:
    advice = advised(RoundPrices(reducer=10), exposed=0.4)
    assert advice.state == "does not pay"
    assert advice.extra_usd_per_hour == 130


def test_it_does_not_pay_when_nothing_waits() -> None:
    advice = advised(exposed=0.0)
    assert (advice.state, advice.speedup) == ("does not pay", 1)


def test_two_nodes_gain_nothing() -> None:
    advice = advised(exposed=0.5, cluster__replica_count=2)
    assert advice.state == "does not pay" and "two nodes" in advice.why


def test_too_few_reducers_in_the_run_file_are_reported() -> None:
    advice = advised(exposed=0.4, cluster__reduction_server={"replica_count": 2})
    assert advice.state == "does not pay" and advice.speedup is not None and advice.speedup < 1
    assert "64 of 400 Gbit/s" in advice.why and "13 pass all" in advice.why


def test_an_unknown_price_is_reported() -> None:
    advice = advised(RoundPrices(unknown=frozenset({"n1-highcpu-16"})), exposed=0.4)
    assert advice.state == "unknown" and advice.extra_usd_per_hour is None
    assert advice.saved_usd_per_hour is not None and "n1-highcpu-16" in advice.why


def test_old_prices_are_reported() -> None:
    assert "prices are old" in advised(RoundPrices(is_old=True), exposed=0.4).why


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_only_strategies_that_all_reduce_may_have_it(strategy: str) -> None:
    config = run_config(cluster__replica_count=4)
    layout = make_layout(strategy, 4, 8)
    time = Time(1.0, (), 0.3, "computing", 1, 1.0, 1.0, None, 0.4, ())
    advice = advise(config, layout, time, SLOW, RoundPrices())
    assert (advice.state != "not possible") == (strategy in ELIGIBLE)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"cluster__replica_count": 1}, "one node"),
        ({"cluster__scheduling_strategy": "flex_start"}, "same machine in all pools"),
        ({"train__strategy": "fsdp"}, "no all-reduce over all its ranks"),
        ({"cluster__accelerator_type": "", "cluster__accelerator_count": 0}, "needs GPUs"),
        ({"node": machine("a3-megagpu-8g", 1600)}, "plugin of its own"),
        ({"node": machine("a3-ultragpu-8g", 3200)}, "plugin of its own"),
        ({"node": machine("a4-highgpu-8g", 3200)}, "plugin of its own"),
        ({"node": machine("e2-standard-4", reduction_server=False)}, "no machine for it"),
    ],
)
def test_it_is_refused_with_a_reason(changes: dict[str, Any], reason: str) -> None:
    advice = advised(**changes)
    assert advice.state == "not possible" and reason in advice.why


def test_a3_high_is_not_documented() -> None:
    advice = advised(node=machine("a3-highgpu-8g", 800, reduction_server=False), exposed=0.4)
    assert advice.state == "unknown" and "nothing documents" in advice.why


def test_the_estimate_itself_weighs_the_exposed_sum() -> None:
    """Eight slow nodes with ZeRO-2, which hides nothing: reducers shorten what is waited for."""
    advice = advised(train__strategy="zero2", cluster__replica_count=8, node=machine(nic_gbps=32))
    assert advice.state == "pays" and advice.speedup is not None and 1.2 < advice.speedup < 1.75
