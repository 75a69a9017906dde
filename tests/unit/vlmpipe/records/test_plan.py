"""What is read again of a plan is what the planner has written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.planner.plans import make_plan
from vlmpipe.records.plan import PlannedRun
from vlmpipe.trainer.errors import ConfigError
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


def test_a_value_that_was_not_written_is_at_its_default() -> None:
    plan = PlannedRun.of({"time": {"steps": 5}, "notes": None, "name": "digits"}, "plan.json")
    assert plan.time and (plan.time.step_s, plan.time.steps) == (None, 5)
    assert (plan.name, plan.cost, plan.notes) == ("digits", None, ())


def at(path: str) -> dict[str, Any]:
    """A plan in which the value at the path has another form."""
    plan = json.loads(json.dumps(make_plan()))
    *above, last = path.split(".")
    place = plan
    for name in above:
        place = place[int(name) if isinstance(place, list) else name]
    place[int(last) if isinstance(place, list) else last] = "soon"
    return plan


@pytest.mark.parametrize(
    "path",
    ("name.0", "cost", "cost.by_term.spot.usd", "cost.by_term.spot.steps.0.usd_per_hour", "memory.parts.3.bytes",
     "time.step_s", "time.interval.low", "jobs.train", "notes"),
)  # fmt: skip
def test_a_value_of_another_form_is_refused_by_its_name(path: str) -> None:
    """Without a price, capacity options would have no limit of spending; without one part, memory would have none."""
    plan = make_plan() | {"name": 3} if path == "name.0" else at(path)
    with pytest.raises(
        ConfigError, match=rf"plan.json is not of this version of vlmpipe, by {path.removesuffix('.0')}"
    ):
        PlannedRun.of(plan, "plan.json")
