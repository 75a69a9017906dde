"""When a plan may be submitted: not when red, and not above the threshold without a yes."""

from __future__ import annotations

import dataclasses
import io
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.paths import ROOT
from vlmpipe.config.run_config import load_run_file
from vlmpipe.planner.cost.estimate import Cost, StepCost
from vlmpipe.planner.spending.approval import (
    Spending,
    dollars,
    on_own_machines,
    reasons_to_confirm,
    require_approval,
    spending_of,
    terminal_confirm,
)
from vlmpipe.trainer.errors import ExitCode, UserError

PLAN = Spending("llava", "green", (), 412.0, 11.25, "4 x a2-ultragpu-8g", "spot")
RED = dataclasses.replace(PLAN, state="red", errors=("VP101 machine_type: no such machine", "memory: 12 GiB too much"))
UNKNOWN = dataclasses.replace(PLAN, usd=None, hours=None, unknown="no price of a4x-highgpu-4g")

CONFIG = load_run_file(ROOT / "tests/fixtures/run_files/llava-7b-zero2-spot.yaml")


class Person:
    """Somebody who always answers the same."""

    def __init__(self, answer: bool) -> None:
        self.answer = answer
        self.heard: list[str] = []

    def __call__(self, question: str) -> bool:
        self.heard.append(question)
        return self.answer


def _refusal(
    plan: Spending, *, above: float = 100.0, force: bool = False, yes: bool = False, person: Person | None = None
) -> UserError:
    with pytest.raises(UserError) as caught:
        require_approval(plan, confirm_above_usd=above, force=force, yes=yes, dry_run=False, ask=person)
    return caught.value


def test_a_cheap_plan_needs_no_confirmation() -> None:
    person = Person(False)
    require_approval(PLAN, confirm_above_usd=412.0, force=False, yes=False, dry_run=False, ask=person)
    assert person.heard == []


def test_a_plan_above_the_threshold_is_confirmed_with_cost_hours_and_machines() -> None:
    person = Person(True)
    require_approval(PLAN, confirm_above_usd=411.99, force=False, yes=False, dry_run=False, ask=person)
    (question,) = person.heard
    for part in ("llava", "$412", "11.2 h", "4 x a2-ultragpu-8g", "spot", "plan.confirm_above_usd", "Submit it?"):
        assert part in question


def test_the_range_of_a_forecast_is_in_the_question_and_grows_with_the_runs() -> None:
    """A search of twenty trials is asked about as firmly, or as loosely, as one run is planned."""
    one = dataclasses.replace(PLAN, usd_range=(300.0, 600.0))
    refusal = _refusal(one.times(20, "20 trials of llava"))
    assert "20 trials of llava is planned to cost $8,240 ($6,000 to $12,000) (about 225.0 h" in refusal.text()
    assert UNKNOWN.times(20, "20 trials").usd_range is None


def test_the_answer_no_submits_nothing() -> None:
    refusal = _refusal(PLAN, person=Person(False))
    assert refusal.code == ExitCode.INTERRUPTED
    assert "nothing was sent" in refusal.found


def test_without_a_terminal_the_error_names_yes() -> None:
    refusal = _refusal(PLAN)
    assert (refusal.code, "--yes" in refusal.fix, "$412" in refusal.found) == (ExitCode.CONFIG, True, True)


def test_yes_confirms_in_advance() -> None:
    person = Person(False)
    require_approval(PLAN, confirm_above_usd=0, force=False, yes=True, dry_run=False, ask=person)
    assert person.heard == []


def test_an_unknown_cost_is_confirmed_with_its_reason() -> None:
    person = Person(True)
    require_approval(UNKNOWN, confirm_above_usd=1e9, force=False, yes=False, dry_run=False, ask=person)
    assert "not known: no price of a4x-highgpu-4g" in person.heard[0]
    assert "hours not known" in person.heard[0]


@pytest.mark.parametrize("person", [None, Person(True)], ids=["nobody", "somebody"])
def test_a_red_plan_is_refused_with_every_error_with_and_without_a_terminal(person: Person | None) -> None:
    refusal = _refusal(RED, yes=True, person=person)
    assert refusal.code == ExitCode.CONFIG
    assert [error in refusal.found for error in RED.errors] == [True, True]
    assert "--force" in refusal.fix


def test_force_does_not_confirm_the_cost() -> None:
    assert "$412" in _refusal(RED, force=True).found
    require_approval(RED, confirm_above_usd=100, force=True, yes=True, dry_run=False, ask=None)


def test_cents_are_printed_only_for_small_amounts() -> None:
    assert [dollars(usd) for usd in (0.5, 99.994, 100, 12345.6)] == ["$0.50", "$99.99", "$100", "$12,346"]


def _cost(*steps: StepCost, missing: tuple[str, ...] = ()) -> Cost:
    usd = [step.usd for step in steps]
    return Cost(
        by_term={}, term="spot", usd=None if None in usd else sum(map(float, usd)), steps=steps, storage_bytes=0,
        storage_usd_per_month=None, schedule_runs_per_month=None, schedule_usd_per_month=None, checkpoint_every_s=None,
        checkpoint_every_steps=None, expected_lost_hours=None, min_lost_hours=None, assumptions=(), missing=missing,
    )  # fmt: skip


def _plan(**fields: Any) -> Any:
    plan = SimpleNamespace(
        **{"state": "green", "errors": [], "cost": None, "bill": None, "load": None, "notes": ()} | fields
    )
    plan.stages = {"": plan}
    return plan


LOAD = SimpleNamespace(steps=100)
TRAIN, EVALUATE = StepCost("train", 4, 10.0, 30.0, 300.0), StepCost("evaluate", 1, 2.0, 8.0, 16.0)


def test_the_plans_cost_is_that_of_all_jobs() -> None:
    spending = spending_of(CONFIG, _plan(cost=_cost(TRAIN, EVALUATE)))
    assert (spending.usd, spending.hours, spending.term) == (316.0, 12.0, "spot")
    assert spending.machines == "4 x a2-ultragpu-8g + 13 x n1-highcpu-16"


def test_unknown_costs_are_named_with_the_known_sum() -> None:
    unpriced = dataclasses.replace(EVALUATE, usd_per_hour=None, usd=None)
    spending = spending_of(CONFIG, _plan(cost=_cost(TRAIN, unpriced, missing=("disk d", "machine m")), load=LOAD))
    assert (spending.usd, spending.hours) == (None, 12.0)
    assert spending.unknown == "no price of disk d, no price of machine m; $300 of it are known"
    unmeasured = dataclasses.replace(EVALUATE, hours=None, usd=None)
    spending = spending_of(CONFIG, _plan(cost=_cost(TRAIN, unmeasured), load=LOAD))
    assert (spending.hours, spending.unknown) == (None, "no hours of evaluate; $300 of it are known")


def test_a_job_of_unknown_hours_is_not_in_the_sum_which_says_so_below_and_above_the_limit() -> None:
    asked = dataclasses.replace(EVALUATE, job="benchmark", hours=None, usd=None)
    cost = dataclasses.replace(_cost(TRAIN, asked), usd=300.0, is_lower_bound=True)
    spending = spending_of(CONFIG, _plan(cost=cost, load=LOAD))
    for limit in (1e9, 100.0):
        told = reasons_to_confirm(spending, limit)
        assert "at least $300, without what is not known: the hours of benchmark" in told


def test_requests_to_buckets_count_as_in_the_bill_and_grow_with_the_runs() -> None:
    spending = dataclasses.replace(PLAN, requests_usd=100.0)
    assert reasons_to_confirm(spending, 512.0) == ""
    assert "$412 (about 11.2 h, 4 x a2-ultragpu-8g, spot), and requests to buckets $100, together more" in (
        reasons_to_confirm(spending, 511.0)
    )
    assert spending.times(3, "three").requests_usd == 300.0


def test_an_endpoint_on_machines_of_ones_own_costs_a_month_at_the_stated_price() -> None:
    own = CONFIG.plan.machine.model_copy(update={"usd_per_hour": 2.0})
    deploy = SimpleNamespace(min_replicas=3)
    plan = CONFIG.plan.model_copy(update={"machine": own})
    config = CONFIG.model_copy(update={"plan": plan, "deploy": deploy})
    found = on_own_machines(config, dataclasses.replace(PLAN, requests_usd=5.0))
    assert (found.usd, found.serving_usd_per_month, found.requests_usd) == (2.0 * 4 * 11.25, 2.0 * 730 * 3, 0.0)


def test_without_a_number_of_samples_its_field_is_named() -> None:
    untimed = dataclasses.replace(TRAIN, hours=None, usd=None)
    assert "plan.samples" in spending_of(CONFIG, _plan(cost=_cost(untimed))).unknown


def test_a_plan_without_a_cost_is_explained_by_its_note() -> None:
    assert spending_of(CONFIG, _plan(notes=("The model's sizes are not known.",))).unknown == (
        "The model's sizes are not known."
    )


class Keyboard(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("typed", "answer"), [("y\n", True), ("Yes \n", True), ("n\n", False), ("\n", False), ("", False), ("ja\n", False)]
)
def test_only_yes_is_yes(monkeypatch: pytest.MonkeyPatch, typed: str, answer: bool) -> None:
    screen = Keyboard()
    monkeypatch.setattr("sys.stdin", Keyboard(typed))
    monkeypatch.setattr("sys.stderr", screen)
    ask = terminal_confirm()
    assert ask is not None
    assert ask("Submit it?") is answer
    assert screen.getvalue() == "Submit it? [y/N] "


def test_without_a_terminal_nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    assert terminal_confirm() is None
