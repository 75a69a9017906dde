"""The order of a job says each of its values in the inputs of a step, in a spec, or around it."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from vlmpipe.job_spec.forms import CustomJobSpec, Scheduling
from vlmpipe.job_spec.order import NO_INPUTS, JobOrder

AROUND_THE_SPEC = {"display_name", "project", "location", "labels", "encryption_spec_key_name"}  # of the CustomJob
POOLS: list[Any] = [{"replica_count": 1}]


def test_every_field_has_a_place_in_the_spec_or_around_it() -> None:
    names = {field.name for field in fields(JobOrder)}
    in_spec = (set(CustomJobSpec.__annotations__) - {"scheduling"}) | set(Scheduling.__annotations__)
    assert names == in_spec | AROUND_THE_SPEC and not in_spec & AROUND_THE_SPEC


def test_values_that_are_not_set_are_left_out() -> None:
    order = JobOrder(display_name="digits-train", worker_pool_specs=POOLS, base_output_directory="gs://b/r")
    assert order.inputs() == {
        "display_name": "digits-train",
        "worker_pool_specs": POOLS,
        "timeout": "604800s",
        "base_output_directory": "gs://b/r",
        "strategy": "STANDARD",
    }
    assert order.spec() == {
        "worker_pool_specs": POOLS,
        "scheduling": {"timeout": "604800s", "strategy": "STANDARD"},
        "base_output_directory": {"output_uri_prefix": "gs://b/r"},
    }


def test_what_no_step_takes_is_in_the_spec_alone() -> None:
    order = JobOrder(display_name="digits-train", disable_retries=True, enable_dashboard_access=True)
    assert not set(NO_INPUTS) & set(order.inputs())
    assert order.spec()["scheduling"]["disable_retries"] and order.spec()["enable_dashboard_access"]
