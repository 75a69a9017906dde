"""What is read again of a plan is what the planner has written."""

from __future__ import annotations

from pathlib import Path

from tests.support.planner.plans import make_plan
from vlmpipe.records.plan import PlannedRun
from vlmpipe.trainer.storage.local import LocalStorage
from vlmpipe.trainer.storage.records import read_record


def test_every_value_that_is_read_again_is_one_of_the_plans(tmp_path: Path) -> None:
    written, store = make_plan(), LocalStorage(tmp_path)
    PlannedRun.write_plan(store, written)
    assert read_record(store, "plan.json").keys() == written.keys()
    plan = PlannedRun.read(store)
    assert plan.time and plan.cost and plan.memory
    assert (plan.time.step_s, plan.time.steps) == (written["time"]["step_s"], written["time"]["steps"])
    assert (plan.cost.usd, len(plan.cost.steps)) == (written["cost"]["usd"], len(written["cost"]["steps"]))
    assert [part.bytes for part in plan.memory.parts] == [part["bytes"] for part in written["memory"]["parts"]]
    assert {term: found.usd for term, found in plan.cost.by_term.items()} == {
        term: found["usd"] for term, found in written["cost"]["by_term"].items()
    }


def test_a_value_of_another_form_leaves_the_others() -> None:
    plan = PlannedRun.of(
        {"time": {"step_s": "soon", "steps": 5}, "cost": 3, "notes": None, "name": "digits"}, "plan.json"
    )
    assert plan.time and (plan.time.step_s, plan.time.steps) == (None, 5)
    assert (plan.name, plan.cost, plan.notes) == ("digits", None, ())
