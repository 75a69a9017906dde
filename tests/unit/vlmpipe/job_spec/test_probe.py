"""Specs of probes: the run's own machines, in every shipped run file."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.pipelines.example_project import load_shipped
from vlmpipe.config.run_config import RunConfig, load_run_file
from vlmpipe.job_spec.build import job_spec
from vlmpipe.job_spec.check import check_job_spec
from vlmpipe.job_spec.probe import probe_spec, probed_machines
from vlmpipe.planner.spending.probe import plan_line, probe_plan, probe_spending
from vlmpipe.trainer.preflight.bought import VARIABLE, BoughtMachine
from vlmpipe.trainer.preflight.probe_plan import INSIDE_S, LIMIT_S, LOOK_S

RUN_FILES = sorted((ROOT / "configs").glob("*.yaml"))
RUN_URI = "gs://bucket/runs/p"


@pytest.mark.parametrize("path", RUN_FILES, ids=lambda path: path.stem)
def test_a_probe_has_the_machine_and_the_image_of_its_job_and_the_api_takes_it(path: Path) -> None:
    config = load_shipped(path)
    machines = probed_machines(config)
    assert len({machine.step for machine in machines}) == len(machines) and machines[0].step == "probe"
    for machine in machines:
        own = job_spec(machine.config, machine.job, RUN_URI)["worker_pool_specs"][0]
        spec = probe_spec(machine, RUN_URI)
        check_job_spec(spec)
        (pool,) = spec["worker_pool_specs"]
        for field in ("machine_spec", "disk_spec"):
            assert pool[field] == own[field]
        assert pool["container_spec"]["image_uri"] == own["container_spec"]["image_uri"]
        assert pool["replica_count"] == 1 and spec["scheduling"]["timeout"] == "180s"
    spending = probe_spending(config, machines)
    assert spending.usd is not None and 0 < spending.usd < 5, plan_line(spending)


@pytest.mark.parametrize("path", RUN_FILES, ids=lambda path: path.stem)
def test_every_job_with_gpus_is_probed(path: Path) -> None:
    config = load_shipped(path)
    probed = [step for machine in probed_machines(config) for step in machine.steps]
    names = [f"{stage}-train" if stage else "train" for stage in config.stage_runs()]
    assert set(names) <= set(probed) and len(probed) == len(set(probed))


def config_with(*overrides: str) -> RunConfig:
    return load_run_file(ROOT / "configs/llava-7b.yaml", list(overrides))


def test_a_probe_only_warns_of_what_is_missing_and_starts_a_rank_for_each_gpu() -> None:
    (machine,) = probed_machines(config_with())
    (pool,) = probe_spec(machine, RUN_URI)["worker_pool_specs"]
    (text,) = (one["value"] for one in pool["container_spec"]["env"] if one["name"] == VARIABLE)
    bought = BoughtMachine.model_validate_json(text)
    assert (bought.check, bought.step, bought.accelerator_count) == ("warn", "probe", 8)
    assert bought.look_timeout_s == LOOK_S < INSIDE_S < LIMIT_S, "the look counts as a part of the probe's time"
    assert pool["container_spec"]["args"][:2] == ["--nproc-per-node", "8"]


@pytest.mark.parametrize("check", ["fail", "warn"])
def test_a_probe_is_told_whether_what_is_missing_ends_the_runs_jobs(check: str) -> None:
    (machine,) = probed_machines(config_with(f"cluster.machine_check={check}"))
    assert probe_plan(machine, "gs://bucket").machine_check == check


def test_another_machine_of_evaluation_gets_a_probe_and_a_plan_of_its_own() -> None:
    l4 = "cluster.evaluate_machine={machine_type: g2-standard-8, accelerator_type: NVIDIA_L4, accelerator_count: 1}"
    train, evaluate = probed_machines(config_with(l4))
    assert (train.steps, evaluate.steps) == (("train",), ("evaluate",))
    plan = probe_plan(evaluate, "gs://bucket")
    assert plan.machine == "g2-standard-8 with 1 x NVIDIA_L4" and not plan.run_names
    assert probe_plan(train, "gs://bucket").run_names == ("llava-7b",)


def test_a_fallback_is_probed_by_its_first_option() -> None:
    options = "cluster.capacity_fallback=[spot, {scheduling_strategy: standard, wait: 0s}]"
    (machine,) = probed_machines(config_with(options))[:1]
    assert probe_spec(machine, RUN_URI)["scheduling"]["strategy"] == "SPOT"


def test_a_job_asks_for_the_addresses_that_jobs_of_its_account_read() -> None:
    read = "evaluate.benchmarks=[{name: mine, format: mmbench, uri: gs://questions/q.tsv}]"
    (machine,) = probed_machines(config_with(read, "model.language_model.weights=gs://weights/llama"))
    (pool,) = probe_spec(machine, RUN_URI)["worker_pool_specs"]
    (text,) = (one["value"] for one in pool["container_spec"]["env"] if one["name"] == VARIABLE)
    assert set(BoughtMachine.model_validate_json(text).reads) == {"gs://questions/q.tsv", "gs://weights/llama"}
