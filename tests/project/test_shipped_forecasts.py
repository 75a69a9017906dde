"""The shipped run files' hours and dollars, in their first comment and in the reference, are those of their plans."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from vlmpipe.catalog.machines import load_catalog
from vlmpipe.cli.views.plan import headline
from vlmpipe.config.run_config import RunConfig, load_run_file
from vlmpipe.planner.cost.cron import runs_per_month
from vlmpipe.planner.cost.estimate import Cost, estimate_cost
from vlmpipe.planner.parallel_layout import layout_of
from vlmpipe.planner.plan import Plan, plan_basis
from vlmpipe.planner.scenario import Scenario
from vlmpipe.planner.time import feature_cache
from vlmpipe.planner.time.step_time import Time, estimate_time

ON_GPUS = [
    path for path in sorted((ROOT / "configs").glob("*.yaml")) if "accelerator_type: NVIDIA" in path.read_text("utf-8")
]


FLAGSHIPS = {"llava-7b-zero2", "llava-7b-hsdp", "llava-34b-tp", "llava-70b-3d"} | {
    "qwen2-5-vl-3b-weekly", "qwen2-5-vl-3b-tune",
}  # fmt: skip
AGAINST = [
    (path, other) for path in ON_GPUS for other in re.findall(r"^# Against (.+?): ", path.read_text("utf-8"), re.M)
]


def forecasts(path: Path, overrides: Sequence[str] = ()) -> dict[str, tuple[Time, Cost]]:
    """Time and cost of the run file's plan by stage, without its memory, which takes traces."""
    return {stage: _forecast(run) for stage, run in load_run_file(path, list(overrides)).stage_runs().items()}


@functools.cache
def forecast(path: Path, *overrides: str) -> tuple[Time, Cost]:
    """Of a run file without stages."""
    return forecasts(path, overrides)[""]


def sentence(time: Time, cost: Cost) -> str:
    """Hours and dollars as `vlmpipe plan` says them."""
    return headline(Plan("", (), {}, time=time, cost=cost).as_dict()).partition("; ")[2]


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
        planned = sentence(time, cost)
        (said,) = re.findall(rf"^# {label}: (.*)$", text, re.M)
        assert said.split()[-1] == planned.split()[-1], f"write into {path.name}: # {label}: {planned}"
        assert numbers(said) == pytest.approx(numbers(planned), rel=0.03), f"write: # {label}: {planned}"
        hours, _, _, usd = numbers(planned)[:4]
        total = [total[0] + hours, total[1] + usd]
    page = (ROOT / "docs/reference/shipped-run-files.md").read_text(encoding="utf-8").splitlines()
    (row,) = [row for row in page if f"(../../configs/{path.name}) |" in row]
    assert numbers(" ".join(row.split(" | ")[3:5])) == pytest.approx(total, rel=0.03), total


@pytest.mark.parametrize(("path", "other"), AGAINST, ids=lambda one: one.stem if isinstance(one, Path) else one)
def test_a_flagship_says_what_the_plan_says_of_a_simpler_way(path: Path, other: str) -> None:
    """Of another run file, or of its own with other settings."""
    (said,) = re.findall(rf"^# Against {re.escape(other)}: (.*)$", path.read_text(encoding="utf-8"), re.M)
    planned = sentence(
        *(forecast(path.with_name(other)) if other.endswith(".yaml") else forecast(path, *other.split()))
    )
    assert said.split()[-1] == planned.split()[-1], f"write into {path.name}: # Against {other}: {planned}"
    assert numbers(said) == pytest.approx(numbers(planned), rel=0.03), f"write: # Against {other}: {planned}"


def test_every_flagship_is_compared_and_a_months_and_a_searchs_dollars_are_those_of_its_runs() -> None:
    assert {path.stem for path, _ in AGAINST} == FLAGSHIPS
    for path in ON_GPUS:
        config, text = load_run_file(path), path.read_text(encoding="utf-8")
        assert ("# A month: " in text, "# All trials: " in text) == (bool(config.schedule), bool(config.tune)), path
        if config.schedule:
            usd = runs_per_month(config.schedule.cron) * (forecast(path)[1].usd or 0)
            assert numbers(text.partition("# A month: ")[2])[0] == pytest.approx(usd, rel=0.03), usd
        if config.tune:
            usd = config.tune.max_trial_count * (forecast(path)[1].usd or 0)
            assert numbers(text.partition("# All trials: ")[2])[0] == pytest.approx(usd, rel=0.03), usd


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
