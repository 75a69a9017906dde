"""The plan of a sweep: what is shared, every variant, and what is asked before all of it is spent."""

from __future__ import annotations

import pytest

from tests.support.paths import ROOT
from vlmpipe.config.run_config import RunConfig, load_run_file
from vlmpipe.planner.plan import plan_run
from vlmpipe.planner.spending.approval import reasons_to_confirm, spending_of
from vlmpipe.planner.steps.estimate import Stage
from vlmpipe.planner.sweep import SweepPlan, plan_config, require_runnable
from vlmpipe.trainer.errors import UserError

SEVEN_B = ROOT / "tests/fixtures/run_files/llava-7b-zero2-spot.yaml"


def swept(variants: str, *overrides: str, starts: int = 2) -> RunConfig:
    return load_run_file(SEVEN_B, [f"sweep={{variants: {variants}, starts: {starts}}}", *overrides])


def planned(config: RunConfig) -> SweepPlan:
    plan = plan_config(config)
    assert isinstance(plan, SweepPlan)
    return plan


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return swept("{short: {train.max_steps: 200}, long: {train.max_steps: 400}, untrained: {train.epochs: 0}}")


@pytest.fixture(scope="module")
def plan(config: RunConfig) -> SweepPlan:
    return planned(config)


def test_trainings_are_summed_and_what_is_shared_counts_once(config: RunConfig, plan: SweepPlan) -> None:
    short = plan_run(load_run_file(SEVEN_B, ["train.max_steps=200"]))
    whole = plan_run(load_run_file(SEVEN_B), stage=Stage(sweep=config.sweep, sweep_jobs=6))
    assert short.cost and whole.cost
    steps = {step.job: step for step in short.cost.steps}
    one = plan.variants["short"]
    assert one.train_hours == steps["train"].hours and one.evaluate_hours == steps["evaluate"].hours
    assert plan.variants["untrained"].train_hours == 0
    shared = [step for step in whole.cost.steps if step.job not in ("train", "evaluate")]
    usd = 2 * sum(each.usd or 0 for each in plan.variants.values()) + sum(step.usd or 0 for step in shared)
    assert plan.usd == pytest.approx(usd)
    ends, around = plan.usd_range, [one.plan.cost for one in plan.variants.values() if one.plan]
    below = 2 * sum((cost.usd or 0) - (cost.usd_range or (0, 0))[0] for cost in around if cost)
    assert ends and ends[0] == pytest.approx(usd - below) and ends[1] > usd
    assert plan.trainings == 6
    assert plan.hours and plan.elapsed_hours and plan.elapsed_hours < plan.hours
    content = plan.as_dict()
    assert content["variants"]["long"]["steps"] == 400
    assert content["shared_usd"] == pytest.approx(sum(step.usd or 0 for step in shared))
    rows = {row.name: row.tasks for row in whole.pipeline.steps if not row.is_job} if whole.pipeline else {}
    assert rows["train-variants"] == 6 and "register-model" not in rows


def test_the_bill_is_that_of_all_trainings_and_of_what_they_share(plan: SweepPlan) -> None:
    bills = [variant.plan.bill for variant in plan.variants.values() if variant.plan]
    bill = plan.bill
    assert bill and len(bills) == 2 and plan.usd and plan.as_dict()["bill"] == bill.as_dict()
    assert bill.usd == plan.usd and bill.serving is None
    assert bill.tokens == pytest.approx(2 * sum(one.tokens or 0 for one in bills if one))
    assert bill.samples == pytest.approx(2 * sum(one.samples or 0 for one in bills if one))
    assert bill.requests_usd == pytest.approx(2 * sum(one.requests_usd or 0 for one in bills if one))
    last, one_kept = plan.shared.stages[""], plan.variants["short"].plan
    assert last.features_cache and last.cost and last.cost.storage_usd_per_month and one_kept and one_kept.cost
    cached = last.features_cache.bytes if last.features_cache.state == "on" else 0
    shared = (cached or 0) / last.cost.storage_bytes * last.cost.storage_usd_per_month
    each = (one_kept.cost.storage_usd_per_month or 0) - shared
    assert bill.storage_usd_per_month == pytest.approx(shared + 4 * each)


def test_jobs_that_share_trainings_leave_less_to_do_side_by_side(config: RunConfig, plan: SweepPlan) -> None:
    assert config.sweep and plan.hours and plan.jobs == 6
    in_one = config.model_copy(update={"sweep": config.sweep.model_copy(update={"trainings_per_job": 6})})
    found = planned(in_one)
    assert (found.jobs, found.elapsed_hours) == (1, pytest.approx(plan.hours))


def test_the_sum_is_what_is_confirmed(config: RunConfig, plan: SweepPlan) -> None:
    assert plan.usd
    spending = spending_of(config, plan)
    assert (spending.usd, spending.hours, spending.usd_range) == (plan.usd, plan.hours, plan.usd_range)
    assert f"{config.name}: 6 trainings is planned to cost" in reasons_to_confirm(spending, plan.usd / 2)


def test_a_variant_that_does_not_fit_makes_the_plan_red_and_is_named() -> None:
    plan = planned(swept("{fits: {}, large: {train.strategy: ddp}}"))
    assert plan.state == "red"
    assert any(error.startswith("variant large: ") and "does not fit" in error for error in plan.errors)
    assert not any("variant fits" in error for error in plan.errors)


def test_a_variant_that_cannot_be_built_is_named() -> None:
    with pytest.raises(UserError, match="variant wrong: ") as caught:
        require_runnable(swept("{right: {}, wrong: {model.train_parameters: ['no_such.*']}}"))
    assert "no_such" in caught.value.text()
