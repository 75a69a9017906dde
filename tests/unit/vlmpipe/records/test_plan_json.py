"""The plan's JSON has every key that its tables read."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping

import pytest

from tests.support.paths import ROOT
from tests.support.planner.plans import PLANS
from vlmpipe.config.run_config import load_run_file
from vlmpipe.planner.stages import plan_whole_run
from vlmpipe.records.plan_json import PlanJson, StagesPlanJson


def missing(value: object, form: object, place: str = "plan") -> list[str]:
    """Keys of a TypedDict that a value or something in it lacks, as dotted places."""
    if isinstance(form, types.UnionType):
        forms = [one for one in typing.get_args(form) if one is not types.NoneType]
        return [] if value is None else missing(value, forms[0], place)
    if typing.is_typeddict(form):
        assert isinstance(value, Mapping), place
        hints = typing.get_type_hints(form, include_extras=True)
        needed = {key for key, hint in hints.items() if typing.get_origin(hint) is not typing.NotRequired}
        lacks = [f"{place}.{key}" for key in sorted(needed - value.keys())]
        return lacks + [text for key in hints.keys() & value.keys() for text in missing(value[key], hints[key], key)]
    if typing.get_origin(form) is list and isinstance(value, list | tuple):
        return [text for one in value for text in missing(one, typing.get_args(form)[0], place)]
    if typing.get_origin(form) is dict and isinstance(value, Mapping):
        return [text for one in value.values() for text in missing(one, typing.get_args(form)[1], place)]
    return []


@pytest.mark.parametrize("name", PLANS)
def test_the_plans_of_other_tests_have_them_too(name: str) -> None:
    assert missing(PLANS[name](), PlanJson) == []


@pytest.mark.parametrize(("name", "form"), [("digits", PlanJson), ("digits-stages", StagesPlanJson)])
def test_a_plan_has_every_key_that_its_tables_read(name: str, form: type) -> None:
    plan = plan_whole_run(load_run_file(ROOT / f"configs/{name}.yaml")).as_dict()
    assert missing(plan, form) == []


def test_a_missing_key_is_found() -> None:
    plan = plan_whole_run(load_run_file(ROOT / "configs/digits.yaml")).as_dict()
    memory = plan["memory"]
    assert isinstance(memory, dict)
    del memory["parts"][0]["why"]
    assert missing(plan, PlanJson) == ["parts.why"]
