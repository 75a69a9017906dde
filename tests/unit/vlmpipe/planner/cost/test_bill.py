"""A run's bill: sums that can be done by hand, a month of serving, and what is not known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.paths import ROOT
from vlmpipe.catalog.prices import load_prices
from vlmpipe.config.run_config import load_run_file
from vlmpipe.pipelines import submit_job
from vlmpipe.planner.cost.bill import Bill, bill_of_stages, serving_cost
from vlmpipe.planner.plan import Plan, plan_run
from vlmpipe.planner.spending.approval import reasons_to_confirm, spending_of
from vlmpipe.planner.stages import plan_whole_run

CONFIG = ROOT / "configs/qwen2-5-vl-7b-qlora.yaml"
DEPLOY = (
    "{endpoint: answers, machine_type: g2-standard-12, accelerator_type: NVIDIA_L4, min_replicas: 1, max_replicas: 3, "
    "image_uri: us-central1-docker.pkg.dev/p/r/vllm@sha256:" + 64 * "0" + "}"
)


@pytest.fixture(scope="module")
def served() -> tuple[Any, Plan]:
    config = load_run_file(CONFIG, [f"deploy={DEPLOY}"])
    return config, plan_run(config)


def test_the_whole_run_is_jobs_steps_and_requests_and_its_prices_are_shares_of_it(served: tuple[Any, Plan]) -> None:
    _, plan = served
    assert plan.bill and plan.cost and plan.cost.usd and plan.cost.requests and plan.load
    bill, told = plan.bill, plan.bill.as_dict()
    assert bill.whole_usd == pytest.approx(plan.cost.usd + (plan.cost.requests.usd or 0))
    assert plan.load.steps and plan.load.samples
    assert bill.samples == pytest.approx(plan.load.samples * plan.load.passes, rel=0.02)
    assert told["usd_per_million_tokens"] == pytest.approx(1e6 * bill.whole_usd / bill.tokens)
    assert told["usd_per_thousand_samples"] == pytest.approx(1e3 * bill.whole_usd / bill.samples)
    assert plan.as_dict()["bill"] == told


def test_a_month_of_serving_is_that_of_all_hours_and_is_part_of_the_approval(served: tuple[Any, Plan]) -> None:
    config, plan = served
    assert plan.bill and plan.bill.serving
    hourly = load_prices().machine("g2-standard-12", "NVIDIA_L4", 1, "us-central1", "standard").usd_per_hour
    serving = plan.bill.serving
    assert serving.usd_per_month == pytest.approx(730 * hourly)
    assert serving.most_usd_per_month == pytest.approx(3 * 730 * hourly)
    spending = spending_of(config, plan)
    reason = reasons_to_confirm(spending, 100.0)  # the run alone costs less
    assert spending.usd and spending.usd < 100 and "and its endpoint then $" in reason and "a month, together" in reason
    assert reasons_to_confirm(replace(spending, serving_usd_per_month=0.0), 100.0) == ""


def test_a_sleeping_endpoint_costs_nothing_idle_and_its_idle_time_each_time_that_it_is_woken() -> None:
    overrides = [f"deploy={DEPLOY.replace('min_replicas: 1', 'min_replicas: 0, idle_minutes: 30')}"]
    config = load_run_file(CONFIG, overrides)
    plan = plan_run(config)
    hourly = load_prices().machine("g2-standard-12", "NVIDIA_L4", 1, "us-central1", "standard").usd_per_hour
    assert plan.bill and plan.bill.serving and hourly
    assert plan.bill.serving.usd_per_month == 0.0
    assert plan.bill.serving.usd_per_wake == pytest.approx(hourly / 2)
    reason = reasons_to_confirm(spending_of(config, plan), 0.0)
    assert f"and its endpoint then ${hourly / 2:,.2f} each time that it is woken, together" in reason


def test_a_run_on_cloud_run_has_its_instances_price_and_is_compared_with_endpoints() -> None:
    given = DEPLOY.replace("machine_type: g2-standard-12, ", "cloud_run: {}, ").replace(
        "min_replicas: 1", "min_replicas: 0"
    )
    plan = plan_run(load_run_file(CONFIG, [f"deploy={given}"]))
    hourly = load_prices().instance(8, 32, "NVIDIA_L4", "us-central1", in_zones=False).usd_per_hour
    assert plan.bill and plan.bill.serving and plan.bill.places and hourly
    serving, told = plan.bill.serving, plan.bill.as_dict()
    assert serving.machines == "Cloud Run (8 vCPUs, 32 GiB, NVIDIA_L4)" and serving.usd_per_month == 0.0
    assert serving.most_usd_per_month == pytest.approx(3 * 730 * hourly)
    assert serving.usd_per_wake == pytest.approx(hourly / 4)
    assert isinstance(told["places"], dict) and len(told["places"]["places"]) == 3


@pytest.mark.parametrize(
    ("run_file", "overrides", "machine"),
    [
        ("digits", [], "n1-highmem-4 with 1 x NVIDIA_TESLA_T4"),
        pytest.param("llava-13b-fsdp", [], "g2-standard-24", marks=pytest.mark.slow),
        ("digits", ["train.precision=bf16"], "g2-standard-8"),
    ],
)
def test_a_run_that_deploys_nothing_has_a_month_on_the_cheapest_machine_that_holds_its_model(
    run_file: str, overrides: list[str], machine: str
) -> None:
    config = load_run_file(ROOT / f"configs/{run_file}.yaml", overrides)
    plan = plan_run(config)
    assert plan.bill and plan.bill.serving is None and plan.bill.places is None
    serving = plan.bill.if_deployed
    assert serving and serving.usd_per_month and serving.machines.startswith(machine) and serving.min_replicas == 1
    assert spending_of(config, plan).serving_usd_per_month == 0.0, "it is not asked for"


def test_a_relevance_module_is_served_by_no_machine() -> None:
    bill = plan_whole_run(load_run_file(ROOT / "configs/arr-coc.yaml")).bill
    assert bill and bill.if_deployed is None and "relevance" in bill.not_deployable


def test_a_machine_without_a_price_is_named_and_left_out_of_the_approval() -> None:
    config = load_run_file(CONFIG, [f"deploy={DEPLOY.replace('g2-standard-12', 'g2-standard-12-none')}"])
    serving = serving_cost(config, load_prices())
    assert serving and serving.usd_per_month is None
    assert any("g2-standard-12-none" in name for name in serving.missing)


def test_the_training_job_alone_has_the_range_of_its_own_dollars(
    served: tuple[Any, Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, plan = served
    monkeypatch.setattr(submit_job, "plan_run", lambda _: plan)
    spending = submit_job._of_training(config)
    assert plan.time and plan.time.interval and spending.usd and spending.usd_range
    interval = plan.time.interval
    assert spending.usd_range == pytest.approx((interval.low * spending.usd, interval.high * spending.usd))
    assert spending.left_out == "" and spending.serving_usd_per_month == 0.0


def test_traffic_to_another_cloud_or_a_mirror_is_not_none() -> None:
    """Reading data from s3 is billed there, and a mirror is in another region."""

    def bill(*overrides: str) -> Bill:
        found = plan_run(load_run_file(CONFIG, ["output.root_uri=gs://b/r", *overrides])).bill
        assert found
        return found

    assert bill("data.source=gs://b/a.jsonl").network_usd == 0.0
    far = bill("data.source=s3://b/a.jsonl")
    assert far.network_usd is None and far.whole_usd
    assert bill("data.source=gs://b/a.jsonl", "checkpoint.mirror_uri=gs://far/m").network_usd is None


def test_stages_have_the_sums_and_an_unknown_one_leaves_the_sum_unknown() -> None:
    bill = Bill(10.0, 1.0, 0.0, 2.0, False, 5e6, 1e3, None, None)
    both = bill_of_stages([bill, replace(bill, usd=30.0, is_lower_bound=True)])
    assert (both.usd, both.whole_usd, both.tokens, both.is_lower_bound) == (40.0, 42.0, 1e7, True)
    assert both.as_dict()["usd_per_million_tokens"] == pytest.approx(4.2)
    unknown = bill_of_stages([bill, replace(bill, usd=None)])
    assert (unknown.whole_usd, unknown.as_dict()["usd_per_million_tokens"]) == (None, None)
