"""Cost: sums that can be done by hand, terms side by side, and what is not known."""

from __future__ import annotations

import dataclasses
import json
import math
from datetime import date
from typing import Any

import pytest

from tests.support.planner.configs import A100_80, LLAVA_7B, RoundPrices, machine, run_config
from vlmpipe.catalog.machines import load_catalog, reducers_needed
from vlmpipe.catalog.prices import load_prices
from vlmpipe.catalog.steps import load_steps
from vlmpipe.cli.views.plan import headline
from vlmpipe.components.runtime.resolve import require_prices
from vlmpipe.planner.cost.estimate import HOURS_PER_MONTH, PIPELINE, Cost, StepCost, estimate_cost
from vlmpipe.planner.parallel_layout import layout_of
from vlmpipe.planner.plan import Plan
from vlmpipe.planner.scenario import Scenario
from vlmpipe.planner.time.external_trainer import external_time
from vlmpipe.planner.time.feature_cache import advise
from vlmpipe.planner.time.saving import SAVE_BYTES_PER_S
from vlmpipe.planner.time.step_time import Time, estimate_time
from vlmpipe.planner.workload import Workload
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.sizing.export_size import published_bytes

NODE_USD = 40 + 100 * 0.17 / HOURS_PER_MONTH  # with its boot disk


def estimated(prices: Any = None, *, node: Any = None, **run: Any) -> tuple[Cost, Time]:
    config, prices, node = run_config(**run), prices or RoundPrices(), node or machine()
    layout, load = layout_of(config), Workload.assumed(config, LLAVA_7B)
    gpu = A100_80 if config.cluster.accelerator_count else None
    cache = advise(config, LLAVA_7B, layout, load, gpu, prices)
    case = Scenario(config, LLAVA_7B, layout, load, node, gpu, cached=cache.state == "on")
    time = external_time(config) if config.train.trainer else estimate_time(case)
    return estimate_cost(case, time, cache, prices), time


def test_training_costs_its_hours_times_its_nodes() -> None:
    cost, time = estimated(cluster__replica_count=2, plan__failures_per_gpu_hour=0)
    train = next(step for step in cost.steps if step.job == "train")
    assert (train.replicas, train.hours) == (2, time.train_hours)
    assert train.usd == pytest.approx(2 * NODE_USD * time.train_hours)


@pytest.mark.parametrize(("hours", "usd"), [(3.0, 3 * 2 * NODE_USD), (None, None)])
def test_another_trainers_price_is_its_known_hours_times_its_nodes(hours: float | None, usd: float | None) -> None:
    mine = {"name": "mine", "command": ["python", "train.py"], "total_steps": 100}
    shape = {"cluster__replica_count": 2, "train__trainer": mine, "features__cache": "off"}
    cost, time = estimated(**shape, plan__train_hours=hours)
    train = next(step for step in cost.steps if step.job == "train")
    assert (train.replicas, train.hours) == (2, hours)
    assert train.usd == (usd and pytest.approx(usd))
    assert (cost.usd is None) == (hours is None)
    assert time.mfu is None


def evaluation(cost: Cost) -> StepCost:
    return next(step for step in cost.steps if step.job == "evaluate")


def test_the_run_is_the_sum_of_its_jobs_and_the_pipelines_steps() -> None:
    cost, _ = estimated(features__cache="on")
    assert [step.job for step in cost.steps] == ["cache_features", "train", "evaluate", PIPELINE]
    assert cost.usd == pytest.approx(sum(step.usd for step in cost.steps))
    assert all(step.hours and step.hours > 0 for step in cost.steps)


def test_a_price_in_the_run_file_is_that_of_a_machine_on_every_term() -> None:
    cost, _ = estimated(plan__machine={"usd_per_hour": 10.0})
    (hourly,) = {step.usd_per_hour for term in cost.by_term.values() for step in term.steps if step.job != PIPELINE}
    assert hourly == pytest.approx(10 + 100 * 0.17 / HOURS_PER_MONTH)


def test_a_job_that_does_not_run_costs_nothing() -> None:
    assert [step.job for step in estimated(features__cache="off")[0].steps] == ["train", "evaluate", PIPELINE]


def test_an_unknown_price_of_the_pipelines_machines_is_named_and_left_out_of_the_sum() -> None:
    known, _ = estimated()
    unknown, _ = estimated(RoundPrices(unknown=frozenset({"e2-standard-4", "e2-standard-16", "e2-highmem-8"})))
    starts = unknown.by_term[unknown.term].pipeline.usd
    assert unknown.usd and known.usd and starts and starts < (known.by_term[known.term].pipeline.usd or 0)
    assert unknown.usd == pytest.approx(starts + sum(step.usd or 0 for step in unknown.steps if step.job != PIPELINE))
    assert [name.split()[0] for name in unknown.missing] == ["e2-standard-4", "e2-standard-16", "e2-highmem-8"]


def test_a_start_of_machines_costs_what_they_cost_on_each_term() -> None:
    cost, _ = estimated(features__cache="off")
    starts = {
        term: sum(step.usd or 0 for step in found.pipeline.steps if step.is_job) for term, found in cost.by_term.items()
    }
    starts_s = [step.start_s for step in cost.by_term["standard"].pipeline.steps if step.is_job]
    assert len(starts_s) == 2 and min(starts_s) > load_steps().start_s("trainer", has_gpus=True), "weights are read too"
    assert starts["standard"] == pytest.approx(NODE_USD * sum(starts_s) / 3600)
    assert starts["spot"] < starts["flex_start"] < starts["standard"]


def test_evaluation_on_more_nodes_takes_less_time() -> None:
    one, four = (evaluation(estimated(cluster__evaluate_replica_count=nodes)[0]) for nodes in (1, 4))
    assert one.hours is not None and four.hours is not None and four.hours < one.hours


def test_evaluation_on_a_machine_of_its_own_is_priced_and_timed_on_it() -> None:
    own = {"machine_type": "a2-ultragpu-1g", "accelerator_type": "NVIDIA_A100_80GB", "accelerator_count": 1}
    shared, alone = (estimated(cluster__evaluate_machine=machine)[0] for machine in (None, own))
    assert shared.steps[0] == alone.steps[0], "training is not touched"
    (on_eight, on_one) = (evaluation(cost).hours for cost in (shared, alone))
    assert on_eight and on_one and 4 * on_eight < on_one
    other = {"machine_type": "g2-standard-8", "accelerator_type": "NVIDIA_L4", "accelerator_count": 1}
    on_l4 = evaluation(estimated(cluster__evaluate_machine=other)[0]).hours
    assert on_l4 and on_l4 > 2 * on_one, "whose rates are lower"
    in_fp32 = evaluation(estimated(cluster__evaluate_machine=own, train__precision="fp32")[0]).hours
    assert in_fp32 and in_fp32 > 2 * on_one, "trained in bf16, a model is evaluated in bf16"


def test_reducers_by_bandwidth_cost_as_the_same_number_written_out() -> None:
    auto, written = (
        estimated(cluster__replica_count=4, cluster__reduction_server={"replica_count": count})[0]
        for count in ("auto", reducers_needed(4, load_catalog().machines["a2-ultragpu-8g"].nic_gbps))
    )
    assert auto.usd == written.usd and auto.usd


def test_a_reservation_is_planned_at_the_standard_price() -> None:
    affinity = {"reservation_affinity_type": "any_reservation"}
    options = ["reservation", {"scheduling_strategy": "spot", "wait": "600s"}]
    cost, _ = estimated(cluster__reservation_affinity=affinity, cluster__capacity_fallback=options)
    assert (cost.capacity_fallback, cost.term) == (("standard", "spot"), "standard")
    assert any("Training tries reservation for 3600s, then spot for 600s" in text for text in cost.assumptions)


def test_terms_are_compared_side_by_side() -> None:
    cost, time = estimated(plan__failures_per_gpu_hour=0)
    standard, spot, flex = (cost.by_term[name] for name in ("standard", "spot", "flex_start"))
    assert cost.usd == standard.usd
    assert standard.train_hours == flex.train_hours == time.train_hours
    assert spot.train_hours is not None and standard.train_hours is not None
    assert spot.train_hours > standard.train_hours
    assert standard.usd is not None and spot.usd is not None and flex.usd is not None
    assert spot.usd < flex.usd < standard.usd


def test_the_run_files_term_is_the_runs_cost() -> None:
    cost, _ = estimated(cluster__scheduling_strategy="spot")
    assert cost.term == "spot" and cost.usd == cost.by_term["spot"].usd


FALLBACK = [{"scheduling_strategy": "spot", "wait": "600s"}, "standard"]


def test_capacity_fallback_is_priced_by_option_and_confirmed_by_the_dearest() -> None:
    cost, _ = estimated(cluster__scheduling_strategy="spot", cluster__capacity_fallback=FALLBACK)
    assert (cost.capacity_fallback, cost.term) == (("spot", "standard"), "standard")
    assert cost.usd == cost.by_term["standard"].usd
    assert any("Training tries spot for 600s, then standard for 3600s" in line for line in cost.assumptions)
    unknown, _ = estimated(RoundPrices(unknown=frozenset({"a2-ultragpu-8g"})), cluster__capacity_fallback=FALLBACK)
    assert unknown.usd is None


def test_an_impossible_capacity_option_makes_the_plan_red_and_a_limit_needs_prices() -> None:
    def planned(cost: Cost) -> Plan:
        return Plan("a", (), {}, cost=cost)

    cost, _ = estimated(node=machine(spot=False), cluster__capacity_fallback=FALLBACK)
    assert planned(cost).errors == [
        "cluster.capacity_fallback: spot is not possible: a2-ultragpu-8g is not offered as Spot"
    ]
    require_prices(planned(cost))
    unknown, _ = estimated(RoundPrices(unknown=frozenset({"a2-ultragpu-8g"})), cluster__capacity_fallback=FALLBACK)
    with pytest.raises(ConfigError, match="training costs on spot, standard is not known"):
        require_prices(planned(unknown))
    with pytest.raises(ConfigError, match="training costs on any option is not known"):
        require_prices(dataclasses.replace(planned(cost), cost=None))


def test_reducers_are_paid_for_training_only() -> None:
    reducers = {"replica_count": 13}
    without, with_them = (
        estimated(cluster__replica_count=4, cluster__reduction_server=value)[0] for value in (None, reducers)
    )
    per_hour = {step.job: step.usd_per_hour for step in without.steps}
    for step in with_them.steps:
        if step.job == PIPELINE:
            continue
        assert step.usd_per_hour == pytest.approx(per_hour[step.job] + (13 * 0.5 if step.job == "train" else 0))


@pytest.mark.parametrize(
    ("changes", "term", "reason"),
    [
        ({"node": machine(spot=False)}, "spot", "not offered as Spot"),
        (
            {"cluster__replica_count": 4, "cluster__reduction_server": {"replica_count": 13}},
            "flex_start",
            "same machine",
        ),
        ({"train__epochs": 30}, "flex_start", "7 days"),
        ({"cluster__accelerator_type": "", "cluster__accelerator_count": 0}, "flex_start", "without GPUs"),
    ],
)
def test_an_unavailable_term_has_a_reason(changes: dict[str, Any], term: str, reason: str) -> None:
    found = estimated(**changes)[0].by_term[term]
    assert not found.possible and reason in found.why_not
    assert estimated()[0].by_term[term].possible


def test_a_missing_price_is_named_and_the_rest_is_computed() -> None:
    cost, _ = estimated(RoundPrices(unknown=frozenset({"a2-ultragpu-8g"})))
    assert cost.usd is None and cost.missing == ("a2-ultragpu-8g in us-central1",)
    assert cost.steps[0].hours is not None
    assert cost.storage_usd_per_month is not None


def test_a_missing_price_of_reducers_or_of_a_disk_makes_a_lower_bound_and_is_named() -> None:
    prices = RoundPrices(unknown=frozenset({"n1-highcpu-16"}))
    cost, _ = estimated(prices, cluster__replica_count=4, cluster__reduction_server={"replica_count": 13})
    by_job = {step.job: step.usd for step in cost.steps}
    assert by_job["train"] and by_job["evaluate"] and cost.usd and cost.is_lower_bound
    assert cost.doubts(0.1)[0] == "the cost is a lower bound, as no price is known for n1-highcpu-16 in us-central1"
    ends = cost.usd_range
    assert ends and ends[0] < cost.usd < ends[1]


def test_an_h200_has_a_cost_on_the_only_boot_disk_that_it_takes() -> None:
    own = {
        "machine_type": "a3-ultragpu-8g",
        "accelerator_type": "NVIDIA_H200_141GB",
        "boot_disk_type": "hyperdisk-balanced",
        "accelerator_count": 8,
    }
    there, _ = estimated(load_prices(), **{f"cluster__{name}": value for name, value in own.items()})
    assert there.usd and there.by_term["spot"].usd and not there.is_lower_bound
    elsewhere, _ = estimated(
        load_prices(), gcp__location="us-east4", **{f"cluster__{name}": value for name, value in own.items()}
    )
    assert elsewhere.usd and elsewhere.is_lower_bound
    assert "boot disk hyperdisk-balanced in us-east4" in elsewhere.missing


def test_old_prices_are_an_assumption() -> None:
    old, new = (estimated(RoundPrices(is_old=value))[0] for value in (True, False))
    (said,) = [sentence for sentence in old.assumptions if "Old prices" in sentence]
    assert "a2-ultragpu-8g (2026-01-01)" in said and "plan.prices_file" in said
    assert not any("Old prices" in sentence for sentence in new.assumptions)


def test_on_cpus_there_is_no_cost() -> None:
    cost, _ = estimated(cluster__accelerator_type="", cluster__accelerator_count=0)
    assert cost.usd is None and cost.checkpoint_every_s is None and cost.expected_lost_hours is None


def test_without_samples_there_is_no_cost_of_the_run_but_one_of_an_hour() -> None:
    cost, _ = estimated(plan__samples=0)
    train = next(step for step in cost.steps if step.job == "train")
    assert cost.usd is None and train.usd_per_hour == pytest.approx(NODE_USD)


def test_an_evaluation_of_unknown_length_is_left_out_and_reported() -> None:
    cost, _ = estimated(plan__samples=0, train__max_steps=100, evaluate__max_samples=0)
    assert cost.usd == pytest.approx(sum(step.usd or 0 for step in cost.steps if step.job in ("train", PIPELINE)))
    assert any("evaluate job" in sentence for sentence in cost.assumptions)


def test_storage_holds_checkpoints_the_export_and_features() -> None:
    off, on = (estimated(features__cache=state)[0] for state in ("off", "on"))
    trainable, total = LLAVA_7B.trainable_parameters, LLAVA_7B.total_parameters
    assert off.storage_bytes == 2 * 12 * trainable + 4 * total  # weights and two moments in fp32; the export
    assert on.storage_bytes - off.storage_bytes == pytest.approx(665_000 * 0.94 * 576 * 1024 * 2, rel=1e-3)
    assert off.storage_usd_per_month == pytest.approx(off.storage_bytes / 2**30 * 0.02)


def test_spot_that_costs_more_than_standard_and_much_lost_time_are_doubts() -> None:
    spot: dict[str, Any] = {"cluster__scheduling_strategy": "spot", "train__checkpoint_every_steps": 100}
    assert estimated(**spot)[0].doubts(0.1) == []
    often = estimated(**spot, plan__preemptions_per_node_hour=0.8)[0].doubts(0.1)
    assert len(often) == 1 and "of training is lost, most of it to interruptions" in often[0]
    dearer = estimated(**spot, plan__preemptions_per_node_hour=2)[0].doubts(0.1)
    assert dearer[0].startswith("spot costs more than standard: $")


def test_dollars_have_the_range_of_the_training_time() -> None:
    cost, time = estimated()
    train = next(step.usd for step in cost.steps if step.job == "train")
    assert cost.usd_range is not None and time.interval is not None
    low, high = cost.usd_range
    assert low == pytest.approx(cost.usd - (1 - time.interval.low) * train)
    assert high == pytest.approx(cost.usd + (time.interval.high - 1) * train)


def test_a_restart_reads_what_its_strategy_loads_of_the_checkpoint() -> None:
    """Every node reads all of it with ddp, and its share with fsdp."""
    reads_s = dict[str, float]()
    for strategy in ("fsdp", "hsdp"):
        cost, time = estimated(train__strategy=strategy, cluster__replica_count=4, cluster__scheduling_strategy="spot")
        lost = cost.by_term["spot"].lost
        assert time.save is not None and lost is not None
        reads_s[strategy] = time.save.reads_s
        restart_s = run_config().plan.restart_s + time.save.reads_s
        assert lost.restarts_hours == pytest.approx(lost.interruptions * restart_s / 3600)
        assert any(
            f"besides the {time.save.reads_s:,.0f} s in which each node reads" in text for text in cost.assumptions
        )
    weights_s = published_bytes(run_config().model, LLAVA_7B) / SAVE_BYTES_PER_S
    of_checkpoint = {strategy: s - weights_s for strategy, s in reads_s.items()}
    assert of_checkpoint["hsdp"] == pytest.approx(4 * of_checkpoint["fsdp"], rel=1e-6) and of_checkpoint["fsdp"] > 1
    assert weights_s > 1, "every node also reads the published weights, as at the first start"


def test_spot_names_the_best_interval_and_what_it_would_lose() -> None:
    cost, time = estimated(
        cluster__scheduling_strategy="spot", cluster__replica_count=4, train__checkpoint_every_steps=10
    )
    assert time.save is not None
    rate_per_s = (4 * 0.02 + 32 * 2e-5) / 3600
    assert cost.checkpoint_every_s == pytest.approx(
        max(time.save.writes_s, math.sqrt(2 * time.save.blocks_s / rate_per_s))
    )
    assert cost.expected_lost_hours is not None and cost.min_lost_hours is not None
    assert cost.min_lost_hours < cost.expected_lost_hours
    best = estimated(
        cluster__scheduling_strategy="spot",
        cluster__replica_count=4,
        train__checkpoint_every_steps=cost.checkpoint_every_steps,
    )[0]
    assert best.expected_lost_hours == pytest.approx(cost.min_lost_hours, rel=1e-6)
    assert any("0.02 times an hour" in sentence for sentence in cost.assumptions)


def test_no_interval_is_suggested_that_is_longer_than_the_run() -> None:
    for steps, suggested in ((2, False), (1_000_000, True)):
        cost, time = estimated(
            cluster__scheduling_strategy="spot",
            train__max_steps=steps,
            train__epochs=10_000,
            train__warmup_fraction=0.0,
        )
        assert time.steps == steps and (cost.checkpoint_every_steps is not None) == suggested
        assert cost.min_lost_hours is not None


def test_a_hopeless_preemption_rate_is_reported() -> None:
    cost, _ = estimated(cluster__scheduling_strategy="spot", plan__preemptions_per_node_hour=30)
    assert cost.usd is None and cost.expected_lost_hours is None and cost.never_ends


def test_a_schedule_costs_its_runs() -> None:
    cost, _ = estimated(schedule={"cron": "0 3 1,15 * *"})
    assert cost.schedule_runs_per_month == 2
    assert cost.usd is not None and cost.schedule_usd_per_month == pytest.approx(2 * cost.usd)
    assert estimated()[0].schedule_usd_per_month is None


def test_costs_are_plain_data_for_json() -> None:
    cost, _ = estimated(
        cluster__scheduling_strategy="spot", plan__preemptions_per_node_hour=0, schedule={"cron": "0 3 * * 1"}
    )
    written = json.loads(json.dumps(dataclasses.asdict(cost), allow_nan=False))
    assert written["by_term"]["spot"]["usd"] == written["usd"] == cost.usd


def test_the_built_in_prices_give_a_cost_or_say_what_is_missing() -> None:
    cost, _ = estimated(load_prices(today=date(2026, 11, 20)))
    for term in cost.by_term.values():
        assert term.usd is not None or term.missing


def test_a_spot_run_that_never_ends_is_red() -> None:
    cost, time = estimated(cluster__scheduling_strategy="spot", plan__preemptions_per_node_hour=60)
    assert cost.never_ends and time.train_hours
    plan = Plan("seven", (), {}, time=time, cost=cost)
    assert plan.state == "red" and "never ends on spot: at one interruption in 1 min" in plan.errors[0]
    sentence = headline(plan.as_dict())
    assert "training never ends on spot" in sentence and "$" not in sentence and " h (" not in sentence
    ends, _ = estimated()
    assert not ends.never_ends


def test_what_most_of_the_loss_is_due_to_is_named() -> None:
    often, _ = estimated(train__checkpoint_every_steps=1, plan__checkpoint_save_s=30.0)
    seldom, _ = estimated(
        cluster__scheduling_strategy="spot", train__checkpoint_every_steps=1000, plan__preemptions_per_node_hour=0.3
    )
    assert often.doubts(0.1)[-1].endswith("most of it to saving checkpoints")
    assert seldom.doubts(0.1)[-1].endswith("most of it to interruptions")
