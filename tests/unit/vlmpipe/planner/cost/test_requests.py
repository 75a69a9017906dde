"""Planned requests of training to its buckets, and their price."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.planner.configs import A100_80, LLAVA_7B, RoundPrices, machine, run_config
from vlmpipe.catalog.prices import load_prices
from vlmpipe.planner.cost.estimate import estimate_cost
from vlmpipe.planner.cost.requests import BucketRequests, bucket_requests
from vlmpipe.planner.parallel_layout import layout_of
from vlmpipe.planner.scenario import Scenario
from vlmpipe.planner.time.feature_cache import advise
from vlmpipe.planner.time.step_time import estimate_time
from vlmpipe.planner.workload import Workload

LARGE = {
    "train__global_batch_size": 512,
    "plan__samples": 1_000_000,
    "data__shard_cache_gib": 400,
    "cluster__boot_disk_size_gb": 2000,
}


def scenario(*, cached: bool = False, **run: Any) -> Scenario:
    config = run_config(**{"output__root_uri": "gs://bucket/root", **run})
    return Scenario(config, LLAVA_7B, layout_of(config), Workload.assumed(config, LLAVA_7B), machine(), None, cached)


def planned(*, cached: bool = False, **run: Any) -> BucketRequests:
    requests = bucket_requests(scenario(cached=cached, **run), RoundPrices())
    assert requests is not None
    return requests


def test_one_machine_fetches_whole_shards_and_many_read_by_range() -> None:
    assert planned(**LARGE).reading == "whole"
    assert planned(**LARGE, cluster__replica_count=64).reading == "ranges"


@pytest.mark.parametrize("reading", ["whole", "ranges"])
def test_the_run_file_decides_before_the_calculation(reading: str) -> None:
    for nodes in (1, 64):
        assert planned(**LARGE, cluster__replica_count=nodes, data__shard_reading=reading).reading == reading


def test_by_range_each_sample_is_one_request() -> None:
    case = scenario(**LARGE, data__shard_reading="ranges")
    requests = bucket_requests(case, RoundPrices())
    assert requests and case.load.samples and case.load.steps
    assert requests.step * case.load.steps == pytest.approx(case.load.samples * case.load.passes)
    split = scenario(**LARGE, data__shard_reading="ranges", train__strategy="tp", train__tensor_parallel=2)
    of_all = bucket_requests(split, RoundPrices())
    assert of_all and of_all.step == pytest.approx(2 * requests.step), "both ranks of a group read its samples"


def test_dollars_are_those_of_both_classes() -> None:
    requests = planned(**LARGE)
    assert requests.usd == pytest.approx((requests.class_a * 0.005 + requests.class_b * 0.0004) / 1000)
    rarer = planned(**LARGE, train__checkpoint_every_steps=10**6)
    assert rarer.class_a < requests.class_a and rarer.step == requests.step


def test_cached_features_add_their_shards() -> None:
    assert planned(**LARGE, cached=True, data__shard_reading="whole").step > planned(**LARGE).step


@pytest.mark.parametrize("change", [{"output__root_uri": "runs"}, {"plan__samples": 0}])
def test_without_a_bucket_or_an_amount_nothing_is_planned(change: dict[str, Any]) -> None:
    assert bucket_requests(scenario(**{**LARGE, **change}), RoundPrices()) is None


def test_both_stores_have_prices_with_sources() -> None:
    prices = load_prices()
    for uri in ("gs://bucket", "s3://bucket"):
        requests = prices.requests(uri)
        assert (
            requests
            and requests.class_a.usd > requests.class_b.usd > 0
            and requests.class_a.source
            and requests.class_a.date
        )
    assert prices.requests("runs") is None
    without = replace(prices, per_1000={})
    assert bucket_requests(scenario(**LARGE), without).usd is None  # type: ignore[union-attr]


def test_requests_that_cost_a_tenth_of_the_run_are_a_doubt() -> None:
    requests = BucketRequests("ranges", 1.0, 1.0, 1.0, 1.0, usd=11.0)
    case, prices = scenario(**LARGE), RoundPrices()
    cache = advise(case.config, LLAVA_7B, case.layout, case.load, A100_80, prices)  # type: ignore[arg-type]
    time = estimate_time(replace(case, gpu=A100_80))
    estimated = estimate_cost(case, time, cache, prices)  # type: ignore[arg-type]
    assert estimated.requests and not estimated.requests_doubt
    cost = replace(estimated, usd=100.0, requests=requests)
    assert "requests to buckets cost $11 more, 11% of the run" in cost.requests_doubt
    assert cost.requests_doubt in cost.doubts(1.0)
    assert "or set data.shard_reading=whole" in cost.requests_doubt
    assert "fit the cache" not in cost.requests_doubt
    too_large = replace(cost, requests=replace(requests, shards_fit=False))
    assert "or set data.shard_reading=whole with shards that fit the cache" in too_large.requests_doubt
    assert any("evaluation, unlike training, reads it whole" in doubt for doubt in too_large.doubts(1.0))
    assert planned(**LARGE).shards_fit and not planned(**LARGE | {"data__shard_cache_gib": 0.01}).shards_fit
    whole = replace(cost, requests=replace(requests, reading="whole"))
    assert "or raise data.shard_cache_gib" in whole.requests_doubt
    for usd in (9.0, None):
        assert replace(cost, requests=replace(requests, usd=usd)).requests_doubt == ""
