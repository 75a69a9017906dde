"""The shipped run files' hours and dollars, in their first comment and in the reference, are those of their plans."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from vlmpipe.catalog.machines import load_catalog
from vlmpipe.cli.views.plan import headline
from vlmpipe.config.run_config import RunConfig, load_run_file
from vlmpipe.planner.cost.estimate import Cost, estimate_cost
from vlmpipe.planner.parallel_layout import layout_of
from vlmpipe.planner.plan import Plan, plan_basis
from vlmpipe.planner.scenario import Scenario
from vlmpipe.planner.time import feature_cache
from vlmpipe.planner.time.step_time import Time, estimate_time

ON_GPUS = [
    path for path in sorted((ROOT / "configs").glob("*.yaml")) if "accelerator_type: NVIDIA" in path.read_text("utf-8")
]


def forecasts(path: Path) -> dict[str, tuple[Time, Cost]]:
    """Time and cost of the run file's plan by stage, without its memory, which takes traces."""
    return {stage: _forecast(run) for stage, run in load_run_file(path).stage_runs().items()}


def forecast(path: Path) -> tuple[Time, Cost]:
    """Of a run file without stages."""
    return forecasts(path)[""]


def _forecast(config: RunConfig) -> tuple[Time, Cost]:
    catalog = load_catalog()
    model, load, prices = plan_basis(config)
    gpu, layout, shape = catalog.gpus[config.cluster.accelerator_type], layout_of(config), load.sized(model.shape)
    cache = feature_cache.advise(config, shape, layout, load, gpu, prices)
    machine = catalog.machines[config.cluster.machine_type]
    case = Scenario(config, shape, layout, load, machine, gpu, cached=cache.state == "on")
    time = estimate_time(case)
    return time, estimate_cost(case, time, cache, prices)


def numbers(text: str) -> list[float]:
    return [float(found.replace(",", "")) for found in re.findall(r"[0-9][0-9,]*(?:\.[0-9]+)?", text)]


@pytest.mark.parametrize("path", ON_GPUS, ids=lambda path: path.stem)
def test_hours_and_dollars_in_a_run_file_and_in_the_reference_are_those_of_its_plan(path: Path) -> None:
    """Within 3 %, and with the same terms; in the reference those of all stages."""
    text, total = path.read_text(encoding="utf-8"), [0.0, 0.0]
    for stage, (time, cost) in forecasts(path).items():
        label = f"Planned, {stage}" if stage else "Planned"
        planned = headline(Plan(path.stem, (), {}, time=time, cost=cost).as_dict()).partition("; ")[2]
        (said,) = re.findall(rf"^# {label}: (.*)$", text, re.M)
        assert said.split()[-1] == planned.split()[-1], f"write into {path.name}: # {label}: {planned}"
        assert numbers(said) == pytest.approx(numbers(planned), rel=0.03), f"write: # {label}: {planned}"
        hours, _, _, usd = numbers(planned)[:4]
        total = [total[0] + hours, total[1] + usd]
    page = (ROOT / "docs/reference/shipped-run-files.md").read_text(encoding="utf-8").splitlines()
    (row,) = [row for row in page if f"(../../configs/{path.name}) |" in row]
    assert numbers(" ".join(row.split(" | ")[3:5])) == pytest.approx(total, rel=0.03), total


@pytest.mark.parametrize("path", ON_GPUS, ids=lambda path: path.stem)
def test_shipped_run_files_use_the_gpus_that_they_pay_for(path: Path) -> None:
    for time, cost in forecasts(path).values():
        assert time.mfu is not None and time.mfu > 0.1
        assert not cost.doubts(0.1)


def test_llava_7b_is_planned_at_most_8_hours_on_one_machine_and_350_dollars_on_spot() -> None:
    """The original took about 10 hours on 8 x A100."""
    time, cost = forecast(ROOT / "configs/llava-7b.yaml")
    cluster = load_run_file(ROOT / "configs/llava-7b.yaml").cluster
    assert (cluster.replica_count, cluster.accelerator_count, cluster.accelerator_type) == (1, 8, "NVIDIA_A100_80GB")
    spot = cost.by_term["spot"]
    assert spot.train_hours is not None and spot.train_hours <= 8
    assert spot.usd is not None and spot.usd <= 350 and cost.term == "spot"
    assert time.interval is not None
