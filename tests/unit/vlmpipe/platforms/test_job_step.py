"""The inputs of a job step are written once, and are those of Google's component."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

import pytest
from google_cloud_pipeline_components.v1.custom_job import CustomTrainingJobOp

from vlmpipe.job_spec.order import NO_INPUTS, JobOrder
from vlmpipe.platforms.job_step import run_custom_job
from vlmpipe.platforms.kubeflow.jobs import job as kubeflow_job
from vlmpipe.platforms.local.jobs import job as local_job
from vlmpipe.platforms.table import PLATFORMS
from vlmpipe.platforms.vertex.jobs import capacity_fallback


def test_inputs_are_those_of_googles_component() -> None:
    ours = [name for name in inspect.signature(run_custom_job).parameters if name != "target"]
    assert ours == [field.name for field in fields(JobOrder) if field.name not in NO_INPUTS]
    assert set(ours) == set(CustomTrainingJobOp.component_spec.inputs)


@pytest.mark.parametrize("target", PLATFORMS)
def test_a_platform_runs_the_job_of_its_step(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def note(*given: Any, **named: Any) -> str:
        calls.append((given, named))
        return "resources"

    monkeypatch.setattr(local_job, "run_job", note)
    monkeypatch.setattr(kubeflow_job, "run_on_kubeflow", note)
    monkeypatch.setattr(capacity_fallback, "run_with_fallback", note)
    pools = [{"replica_count": 1}]
    labels = {"vlmpipe-step": "evaluate"}
    assert run_custom_job(target, "digits", worker_pool_specs=pools, timeout="60s", labels=labels) == ("resources",)
    ((given, named),) = calls
    spec = given[0].spec() if target == "vertex" else given[1]
    assert (spec["worker_pool_specs"], spec["scheduling"]["timeout"]) == (pools, "60s")
    assert "network" not in spec and "psc_interface_config" not in spec
    if target == "vertex":
        (order,) = given
        assert (order.display_name, order.labels, order.strategy) == ("digits", labels, "STANDARD")
    else:
        assert (given[0], named["labels"]) == ("digits", labels)
