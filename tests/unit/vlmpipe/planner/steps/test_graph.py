"""The planned steps are those of the compiled pipelines, with their images and machines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.pipelines import golden_pipelines
from tests.support.pipelines.example_project import load_shipped
from tests.support.short_form import WHOLE
from vlmpipe.catalog.machines import load_catalog
from vlmpipe.catalog.steps import load_steps
from vlmpipe.config.run_config import RunConfig
from vlmpipe.planner.steps.graph import GraphStep, graph_steps

OF_THE_RUN = ("register-model", "deploy-model", "mail", "notify")  # without a stage's name
COMPILED = (*golden_pipelines.KEPT_NAMES, "arr-coc", "digits", "llava-34b-tp")  # others by the whole form
IMAGE_OF_JOBS = "google-cloud-pipeline-components"


def compiled_steps(path: Path) -> dict[str, dict[str, Any]]:
    def walk(steps: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        for name, step in steps.items():
            if "image" in step:
                yield name, step
            yield from walk(step.get("steps") or {})

    return dict(walk(golden_pipelines.graph(path)))


def planned_steps(config: RunConfig) -> dict[str, GraphStep]:
    runs = config.stage_runs()
    found = {}
    for stage, run in runs.items():
        is_last = stage == list(runs)[-1]
        sweep = config.sweep if is_last else None
        for step in graph_steps(run, encodes=True, is_last=is_last, sweep=sweep):
            found[f"{stage}-{step.name}" if stage and step.name not in OF_THE_RUN else step.name] = step
    return found


@pytest.mark.parametrize(
    "path", [path for path in golden_pipelines.RUN_FILES if WHOLE or path.stem in COMPILED], ids=lambda path: path.stem
)
def test_every_step_of_a_shipped_pipeline_is_planned_with_its_image_and_its_machine(path: Path) -> None:
    planned, compiled, facts = planned_steps(load_shipped(path)), compiled_steps(path), load_steps()
    assert set(planned) == set(compiled)
    for name, step in planned.items():
        assert (step.image == "launcher") == (IMAGE_OF_JOBS in compiled[name]["image"]), name
        limits, machine = compiled[name].get("machine"), load_catalog().machines[facts.machine_of(step.name)]
        assert (limits is None) == (machine.machine_type == facts.default_machine), name
        if limits:
            assert float(limits["resourceCpuLimit"]) <= machine.vcpus
            assert float(limits["resourceMemoryLimit"].removesuffix("G")) * 10**9 <= machine.memory_gib * 2**30


def test_every_step_that_a_pipeline_may_have_has_its_work_stated() -> None:
    more = ['notify={"email": ["a@b.org"]}', "data.tasks=3", "deploy.endpoint=digits"]
    digits = load_shipped(golden_pipelines.ROOT / "configs/digits.yaml", more)
    names = {step.name for step in graph_steps(digits, encodes=True)}
    assert {"plan-data", "prepare-chunks", "deploy-model", "mail"} < names
    shipped = {step.name for path in golden_pipelines.RUN_FILES for step in planned_steps(load_shipped(path)).values()}
    assert names | shipped <= set(load_steps().steps)
    assert set(load_steps().steps) == names | shipped | {"benchmark"}
