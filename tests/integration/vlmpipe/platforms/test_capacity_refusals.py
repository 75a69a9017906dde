"""cluster.capacity_fallback before a job is sent: the compiled step, the planned price, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.support.pipelines.graphs import all_tasks, shape, steps
from tests.support.vertex.capacity_fallback import RESERVED, SPOT_FILE, config
from vlmpipe.config.run_config import load_run_file
from vlmpipe.config.validation_errors import RunFileError
from vlmpipe.job_spec.check import check_jobs
from vlmpipe.pipelines.compile import compile_pipeline
from vlmpipe.planner.sweep import plan_config
from vlmpipe.trainer.errors import ConfigError


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["cluster.capacity_fallback=[{scheduling_strategy: spot, location: us-central1}, spot]"], "which is gcp.loc"),
        (
            [
                "cluster.capacity_fallback=[spot, {scheduling_strategy: spot, location: us-east1}]",
                "gcp.encryption_spec_key_name=projects/p/locations/us-central1/keyRings/r/cryptoKeys/k",
            ],
            r"spot@us-east1 with gcp\.encryption_spec_key_name, which is of us-central1",
        ),
        (
            [
                RESERVED,
                "cluster.capacity_fallback=[{scheduling_strategy: standard, reservation: true, location: us-east1}, "
                "reservation]",
            ],
            "reservation takes no location",
        ),
    ],
)
def test_a_region_that_cannot_help_is_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(RunFileError, match=said):
        config(*overrides)


def test_machines_that_another_region_has_not_are_refused_and_its_price_is_planned() -> None:
    fallback = "cluster.capacity_fallback=[spot, {scheduling_strategy: standard, location: %s}]"
    with pytest.raises(ConfigError, match=r"found NVIDIA_A100_80GB in us-west3.*job train on standard in us-west3"):
        check_jobs(config(fallback % "us-west3"), "gs://bucket/runs/r")
    cost = plan_config(config(fallback % "europe-west4")).cost
    assert cost and list(cost.elsewhere) == ["standard@europe-west4"] and cost.capacity_fallback == ("spot",)
    assert cost.option_numbers == {"spot": 1, "standard@europe-west4": 2}
    assert cost.elsewhere["standard@europe-west4"].usd != cost.by_term["standard"].usd
    assert any("in other regions" in one and "us-central1" in one for one in cost.assumptions)


# ---- the pipeline, the plan, and what is refused


def test_the_graph_is_the_same_on_both_targets_and_the_step_is_ours(tmp_path: Path) -> None:
    wanted = config()
    specs = {
        target: yaml.safe_load(compile_pipeline(wanted, target, tmp_path / f"{target}.yaml").path.read_text())  # type: ignore[arg-type]
        for target in ("vertex", "local")
    }
    assert shape(specs["vertex"]) == shape(specs["local"])
    labels = {path.rpartition("/")[2]: component["executorLabel"] for path, _, component in all_tasks(specs["vertex"])
              if "executorLabel" in component}  # fmt: skip
    container = specs["vertex"]["deploymentSpec"]["executors"][labels["train"]]["container"]
    assert container["image"] == wanted.gcp.pipeline_image
    assert "run_custom_job" in str(container)
    given = [steps(specs[target])["train"]["inputs"]["parameters"]["target"] for target in specs]
    assert [value["runtimeValue"]["constant"] for value in given] == ["vertex", "local"]
    assert "strategy" in steps(specs["vertex"])["evaluate"]["inputs"]["parameters"]


@pytest.mark.parametrize(
    "field",
    ["cluster.disable_retries=true", "gcp.enable_dashboard_access=true", "cluster.scheduling_strategy=flex_start"],
)
def test_jobs_with_such_fields_are_steps_of_ours(tmp_path: Path, field: str) -> None:
    wanted = config("cluster.capacity_fallback=[]", field)
    spec = yaml.safe_load(compile_pipeline(wanted, "vertex", tmp_path / "p.yaml").path.read_text())
    executors = [str(one["container"]) for one in spec["deploymentSpec"]["executors"].values()]
    assert not any("google_cloud_pipeline_components.container" in one for one in executors)
    assert any("run_custom_job" in one for one in executors)


REFUSALS = {
    "a reservation on Spot": (
        "cluster.capacity_fallback=[{scheduling_strategy: spot, reservation: true}, standard]",
        "reservation needs scheduling_strategy standard",
    ),
    "a reservation without a name": ("cluster.capacity_fallback=[reservation, spot]", "which says which one"),
    "a reservation that nothing uses": (
        "cluster.reservation_affinity={reservation_affinity_type: any_reservation}",
        "add reservation to it",
    ),
    "a specific reservation without a name": (
        "cluster.reservation_affinity={reservation_affinity_type: specific_reservation}",
        "takes at least one",
    ),
    "one option": ("cluster.capacity_fallback=[spot]", "several different"),
    "a option twice": ("cluster.capacity_fallback=[spot, spot]", "several different"),
    "an endless wait before others": (
        "cluster.capacity_fallback=[{scheduling_strategy: spot, wait: 0s}, standard]",
        "only the last option",
    ),
    "persistent machines": ("gcp.persistent_resource_id=mine", "machines exist already"),
    "reducers": ("cluster.reduction_server={replica_count: 2}", "cluster.capacity_fallback flex_start"),
    "too long for flex_start": ("cluster.timeout=700000s", "at most 604800s with flex_start"),
    "no GPU": ("cluster.accelerator_count=0", "flex_start without GPUs"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_job_that_one_option_cannot_run_is_refused(name: str) -> None:
    override, said = REFUSALS[name]
    overrides = [override, *(["cluster.accelerator_type="] if name == "no GPU" else [])]
    with pytest.raises(RunFileError, match=said):
        config(*overrides)


def test_every_rung_obeys_the_rules_for_job_specs_and_a_limit_a_ladder() -> None:
    with pytest.raises(ConfigError, match="VP402"):  # a GPU that flex_start does not offer
        check_jobs(config("cluster.machine_type=n1-standard-8", "cluster.accelerator_type=NVIDIA_TESLA_V100",
                          "cluster.accelerator_count=8"), "gs://bucket/run")  # fmt: skip
    with pytest.raises(RunFileError, match="watched by a capacity_fallback only"):
        load_run_file(SPOT_FILE, ["cluster.max_spend_usd=5"])
