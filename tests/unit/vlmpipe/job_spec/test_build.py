"""Strict reading of CustomJob specs: wrong specs are refused in words, right ones pass."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.support.paths import ROOT
from tests.support.pipelines.run_files import small
from vlmpipe.catalog.machines import load_catalog
from vlmpipe.config.run_config import load_run_file, parse_run_config
from vlmpipe.job_spec.build import job_spec, jobs_of, reducer_count, worker_pools
from vlmpipe.job_spec.check import job_violations
from vlmpipe.job_spec.parse import parse_job_spec
from vlmpipe.job_spec.rules import check_spec
from vlmpipe.planner.cost.quotas import quotas
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.preflight.bought import VARIABLE, BoughtMachine


def test_pools_follow_the_number_of_nodes() -> None:
    overrides = ["cluster.replica_count=4", "cluster.evaluate_replica_count=2", "train.global_batch_size=64"]
    config = load_run_file(ROOT / "configs/digits.yaml", overrides)
    counts = {
        job: [pool["replica_count"] for pool in worker_pools(config, job, "r")]
        for job in ("cache_features", "train", "evaluate")
    }
    assert counts == {"cache_features": [1], "train": [1, 3], "evaluate": [1, 1]}


def test_a_node_runs_the_launcher_with_the_run_file_of_its_run() -> None:
    config = load_run_file(ROOT / "configs/digits.yaml", ["cluster.env={A: b}"])
    (chief, *_) = worker_pools(config, "train", "out/runs/r1")
    container = chief["container_spec"]
    assert container["command"] == ["python", "-m", "vlmpipe.trainer.launch"]
    assert container["args"] == [
        "--nproc-per-node",
        "1",
        "--",
        "vlmpipe.trainer.train",
        "--config",
        "out/runs/r1/run.json",
    ]
    assert container["env"] == [{"name": "A", "value": "b"}]


def test_the_wandb_project_is_in_the_training_jobs_environment() -> None:
    """So that a network without a way out is pointed out before anything is submitted."""
    network = ["gcp.project=my-project", "gcp.network=projects/1/global/networks/lab"]
    config = load_run_file(ROOT / "configs/digits.yaml", ["train.wandb={project: vlm}", *network])
    env = {
        job: {variable["name"]: variable["value"] for variable in pools[0]["container_spec"].get("env", ())}
        for job in ("cache_features", "train", "evaluate")
        if (pools := worker_pools(config, job, "r"))
    }
    assert {job: values.get("WANDB_PROJECT") for job, values in env.items()} == {
        "cache_features": None,
        "train": "vlm",
        "evaluate": None,
    }
    codes = {job: {found.code for found in job_violations(config, job, "r")} for job in jobs_of(config)}
    assert [job for job in jobs_of(config) if "VP504" in codes[job]] == ["train"]


def test_a_spec_omits_settings_that_are_not_set() -> None:
    content = load_run_file(ROOT / "configs/digits.yaml").to_dict()
    spec = job_spec(parse_run_config({**content, "gcp": {}}, "digits"), "train", "out")
    assert set(spec) == {"worker_pool_specs", "scheduling", "base_output_directory"}
    assert set(spec["scheduling"]) == {"timeout", "strategy", "restart_job_on_worker_restart"}


def test_a_flex_start_jobs_wait_is_in_its_spec() -> None:
    waits = ["cluster.scheduling_strategy=flex_start", "cluster.max_wait_duration=7200s"]
    config = load_run_file(ROOT / "configs/llava-7b.yaml", waits)
    spec = job_spec(config, "train", "gs://bucket/run")
    assert (spec["scheduling"]["strategy"], spec["scheduling"]["max_wait_duration"]) == ("FLEX_START", "7200s")


FALLBACK = "cluster.capacity_fallback=[{scheduling_strategy: spot}, {scheduling_strategy: standard}]"


@pytest.mark.parametrize(
    ("run_file", "overrides", "expected"),
    [
        ("configs/digits", [], {"cpus": 16}),  # two n1-standard-8
        ("configs/llava-7b-lora", [], {"preemptible_nvidia_a100_gpus": 8}),
        ("tests/fixtures/run_files/llava-7b-zero2-spot", [FALLBACK], {
            "preemptible_nvidia_a100_80gb_gpus": 32, "preemptible_cpus": 208,  # 13 reducers of 16
            "nvidia_a100_80gb_gpus": 32, "cpus": 208,
        }),
    ],
)  # fmt: skip
def test_a_runs_quotas_are_those_of_its_largest_job_for_each_capacity_option(
    run_file: str, overrides: list[str], expected: dict[str, int]
) -> None:
    found = quotas(load_run_file(ROOT / f"{run_file}.yaml", overrides))
    assert found == {f"custom_model_training_{name}": count for name, count in expected.items()}


PROGRAM = {"name": "mine", "command": ["python", "train.py", "{data}", "{output}"], "image_uri": "mine:1"}


def trainer_pools(job: str = "train", **trainer: Any) -> list[dict[str, Any]]:
    nodes = {"cluster__replica_count": 3, "cluster__image_uri": "ours:1"}
    config = small(train__trainer={**PROGRAM, **trainer}, train__global_batch_size=12, **nodes)
    return worker_pools(config, job, "gs://b/run")  # type: ignore[arg-type]


def test_a_training_program_has_its_image_in_training_only() -> None:
    jobs = ("cache_features", "train", "evaluate")
    images = {job: {pool["container_spec"]["image_uri"] for pool in trainer_pools(job)} for job in jobs}
    assert images == {"cache_features": {"ours:1"}, "train": {"mine:1"}, "evaluate": {"ours:1"}}
    container = trainer_pools()[0]["container_spec"]
    assert container["command"] == ["python", "-m", "vlmpipe.trainer.external.launch"]
    assert container["args"][-2:] == ["--config", "gs://b/run/run.json"]


def test_parameter_servers_and_evaluators_are_pools_2_and_3() -> None:
    pools = trainer_pools(launch="tensorflow", roles={"ps": 2, "evaluator": 1})
    assert [pool["replica_count"] for pool in pools] == [1, 2, 2, 1]
    assert parse_job_spec({"worker_pool_specs": pools})
    codes = {one.code for one in check_spec({"worker_pool_specs": pools}, region="", catalog=load_catalog())}
    assert "VP407" not in codes, "advice about NCCL is not for parameter servers"


def test_parameter_servers_may_have_a_machine_of_their_own() -> None:
    roles = {"ps": 2, "ps_machine_type": "n1-highmem-8", "evaluator": 1}
    *nodes, servers, evaluator = trainer_pools(launch="roles", roles=roles)
    assert servers["machine_spec"] == {"machine_type": "n1-highmem-8"}
    assert evaluator["machine_spec"] == nodes[0]["machine_spec"] != servers["machine_spec"]


def test_a_package_is_a_python_package_spec_that_starts_the_launcher() -> None:
    package = {"executor_image_uri": "executor:1", "package_uris": ["gs://b/mine.tar.gz"], "python_module": "mine.task"}
    (chief, _) = trainer_pools(kind="package", **package, image_uri="")
    spec = chief["python_package_spec"]
    assert (spec["python_module"], spec["package_uris"]) == ("vlmpipe.trainer.external.launch", ["gs://b/mine.tar.gz"])
    assert parse_job_spec({"worker_pool_specs": [chief]})


def test_an_evaluation_of_ones_own_runs_in_the_programs_image() -> None:
    (chief,) = trainer_pools("evaluate", result="opaque", evaluate_command=["python", "judge.py", "{model}"])
    assert chief["container_spec"]["image_uri"] == "mine:1"
    assert chief["container_spec"]["command"][-1] == "vlmpipe.trainer.external.evaluate"


L4 = {"machine_type": "g2-standard-8", "accelerator_type": "NVIDIA_L4", "accelerator_count": 1}


def test_jobs_beside_training_may_run_on_machines_of_their_own() -> None:
    own = "{machine_type: g2-standard-8, accelerator_type: NVIDIA_L4, accelerator_count: 1, boot_disk_size_gb: 200}"
    config = load_run_file(ROOT / "configs/llava-13b-fsdp.yaml", [f"cluster.evaluate_machine={own}"])
    pools = {job: worker_pools(config, job, "gs://b/r") for job in jobs_of(config)}
    assert pools["evaluate"][0]["machine_spec"] == L4
    assert pools["evaluate"][0]["disk_spec"]["boot_disk_size_gb"] == 200
    assert pools["evaluate"][0]["container_spec"]["args"][:2] == ["--nproc-per-node", "1"]
    assert {pools[job][0]["machine_spec"]["machine_type"] for job in ("train", "cache_features")} == {"a3-highgpu-8g"}
    with pytest.raises(ConfigError, match="each rank needs its own GPU"):
        load_run_file(
            ROOT / "configs/digits.yaml", [f"cluster.features_machine={own[:-1]}, processes_per_replica: 2}}"]
        )


def test_auto_gives_the_reducers_that_match_the_nodes_bandwidth() -> None:
    path = ROOT / "tests/fixtures/run_files/llava-7b-zero2-spot.yaml"
    config = load_run_file(path, ["cluster.reduction_server={replica_count: auto}"])
    nodes = config.cluster.replica_count
    gbps = load_catalog().machines[config.cluster.machine_type].nic_gbps
    assert worker_pools(config, "train", "gs://b/r")[2]["replica_count"] == math.ceil(nodes * gbps / 32)
    unknown = config.cluster.model_copy(update={"machine_type": "z9-standard-8"})
    with pytest.raises(ConfigError, match="nothing is known of z9-standard-8"):
        reducer_count(unknown)


def test_only_the_training_jobs_machine_must_multiply_8_bit_floats() -> None:
    overrides = ["train.strategy=fsdp", "train.float8=tensorwise"]
    config = load_run_file(ROOT / "configs/llava-7b.yaml", overrides)
    asks = {}
    for job in jobs_of(config):
        chief, *_ = job_spec(config, job, "gs://bucket/run")["worker_pool_specs"]
        (text,) = (one["value"] for one in chief["container_spec"]["env"] if one["name"] == VARIABLE)
        asks[job] = BoughtMachine.model_validate_json(text).float8
    assert asks.pop("train") and asks and not any(asks.values())
