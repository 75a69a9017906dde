"""The plan of several stages: the plans of each, their sums, and what is asked before the sum is spent."""

from __future__ import annotations

import pytest

from tests.support.paths import ROOT
from vlmpipe.config.run_config import RunConfig, load_run_file
from vlmpipe.planner.cost.quotas import quotas
from vlmpipe.planner.plan import Plan, plan_run
from vlmpipe.planner.spending.approval import reasons_to_confirm, spending_of
from vlmpipe.planner.stages import StagesPlan, plan_whole_run
from vlmpipe.planner.steps.estimate import Stage
from vlmpipe.planner.sweep import require_runnable
from vlmpipe.trainer.errors import UserError

SEVEN_B = ROOT / "tests/fixtures/run_files/llava-7b-zero2-spot.yaml"
ALIGN = "freeze: [tower, language_model], data: {source: gs://example-bucket/pairs.json}"


def staged(align: str = "", finetune: str = "", *overrides: str, samples: int = 558_128) -> RunConfig:
    first = f"{{name: align, {ALIGN}, plan: {{samples: {samples}}}, {align}}}"
    return load_run_file(SEVEN_B, [f"stages=[{first}, {{name: finetune, {finetune}}}]", *overrides])


def planned(config: RunConfig) -> StagesPlan:
    plan = plan_whole_run(config)
    assert isinstance(plan, StagesPlan)
    return plan


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return staged("train: {max_steps: 200}", "", "schedule.cron=0 3 * * 1")


@pytest.fixture(scope="module")
def plan(config: RunConfig) -> StagesPlan:
    return planned(config)


def test_stages_are_planned_as_their_own_run_files_and_summed(config: RunConfig, plan: StagesPlan) -> None:
    align, finetune = config.stage_runs().values()
    each = [plan_run(align, stage=Stage(is_last=False)), plan_run(finetune, stage=Stage(is_first=False))]
    first, last = ([step.name for step in one.pipeline.steps] for one in each if one.pipeline)
    assert set(last) - set(first) == {"register-model", "notify"}, "once, after the last stage"
    assert [one.as_dict() for one in plan.stages.values()] == [one.as_dict() for one in each]
    served = [one.bill and one.bill.if_deployed for one in each]
    assert served[0] is None and served[1] and plan.bill and plan.bill.if_deployed == served[1]
    usd = [one.cost.usd for one in each if one.cost and one.cost.usd]
    assert len(usd) == 2 and usd[0] != usd[1]
    assert plan.usd == pytest.approx(sum(usd))
    assert plan.train_hours == pytest.approx(sum(one.time.train_hours for one in each if one.time))  # type: ignore[misc]
    content = plan.as_dict()
    low, high = content["usd_range"]
    assert low < plan.usd < high and low > 0
    assert content["schedule_usd_per_month"] == pytest.approx(plan.usd * content["schedule_runs_per_month"])
    assert [stage["starts_from"] for stage in content["stages"].values()] == [
        "openai/clip-vit-large-patch14-336, lmsys/vicuna-7b-v1.5",
        "export of align",
    ]
    assert [stage["data"].rpartition("/")[2] for stage in content["stages"].values()] == [
        "pairs.json",
        "llava_v1_5_mix665k.json",
    ]


def test_the_sum_is_what_is_confirmed(config: RunConfig, plan: StagesPlan) -> None:
    dearest = max(one.cost.usd for one in plan.stages.values() if one.cost and one.cost.usd)
    spending = spending_of(config, plan)
    assert spending.usd_range == plan.as_dict()["usd_range"] is not None
    assert spending.usd == plan.usd and not reasons_to_confirm(spending, spending.usd + spending.requests_usd)
    assert f"{config.name} is planned to cost" in reasons_to_confirm(spending, dearest)


def test_machines_and_quotas_are_those_of_the_largest_stage() -> None:
    small = "cluster: {replica_count: 1, reduction_server: null}"
    config = staged(small)
    assert quotas(config) == quotas(staged())
    spending = spending_of(config, planned(config))
    assert spending.machines == "1 x a2-ultragpu-8g, then 4 x a2-ultragpu-8g + 13 x n1-highcpu-16"


def test_an_unknown_cost_of_a_stage_leaves_the_sum_open_and_names_it() -> None:
    config = staged(samples=0)
    plan = planned(config)
    assert plan.usd is None and plan.as_dict()["usd_range"] is None
    unknown = spending_of(config, plan).unknown
    assert unknown.startswith("stage align: ") and "plan.samples" in unknown and "finetune" not in unknown


def test_a_stage_that_does_not_fit_makes_the_plan_red_and_is_named() -> None:
    plan = planned(staged("", "train: {strategy: ddp}"))
    assert plan.state == "red" and plan.stages["align"].state != "red"
    assert all(error.startswith("stage finetune: ") for error in plan.errors) and "does not fit" in plan.errors[0]


def test_a_stage_that_cannot_be_built_is_named() -> None:
    with pytest.raises(UserError, match="stage align: ") as caught:
        require_runnable(staged("model: {train_parameters: ['no_such.*']}"))
    assert "no_such" in caught.value.text()


def test_without_stages_the_plan_is_that_of_the_run_file() -> None:
    assert isinstance(plan_whole_run(load_run_file(SEVEN_B)), Plan)
