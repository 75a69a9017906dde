"""Disks, memory and money of a pipeline's steps."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.pipelines import golden_pipelines
from tests.support.short_form import chosen
from vlmpipe.catalog.steps import load_steps
from vlmpipe.catalog.this_machine import LocalMachine
from vlmpipe.config.run_config import RunConfig, load_run_file
from vlmpipe.planner.model_architecture import architecture
from vlmpipe.planner.plan import Plan, plan_run
from vlmpipe.planner.steps import needs
from vlmpipe.planner.steps.disks import compiled_disks
from vlmpipe.planner.steps.estimate import PipelinePlan, Stage, disk_for, plan_steps, step_disks
from vlmpipe.planner.steps.graph import graph_steps
from vlmpipe.planner.steps.needs import GB
from vlmpipe.planner.sweep import plan_config
from vlmpipe.trainer.data.shards.disk_cache import SHARE_OF_FREE_DISK
from vlmpipe.trainer.data.sources.file_patterns import SHARE_OF_CACHE
from vlmpipe.trainer.sizing.checkpoint_size import checkpoint_bytes
from vlmpipe.trainer.sizing.export_size import ExportSize
from vlmpipe.trainer.sizing.model_shape import ModelShape

SEVENTY_B = ROOT / "configs/llava-70b.yaml"
SEVEN_B = ROOT / "configs/llava-7b.yaml"
ADAPTERS = ["model.freeze=[tower]", "model.lora={rank: 16}"]
PLANNED: dict[str, tuple[Path, list[str]]] = {path.stem: (path, []) for path in golden_pipelines.RUN_FILES} | {
    "llava-7b, a sweep": (SEVEN_B, ["sweep={variants: {short: {train.max_steps: 9}, long: {train.max_steps: 99}}}"])
}
SHORT = ("llava-7b", "llava-7b, a sweep", "digits-stages")  # other run files are planned by the whole form


@pytest.fixture(scope="module")
def seventy_b() -> ModelShape:
    return architecture(load_run_file(SEVENTY_B)).shape


def plan_of(config: RunConfig, shape: ModelShape | None, disks: dict[str, int] | None = None) -> PipelinePlan:
    """Of a run with the model, on the disks of a compiled pipeline, or on those that the plan chooses."""
    samples = needs.all_samples(config.plan.samples or None, config.data.validation_fraction)
    hours = dict.fromkeys(("cache_features", "train", "evaluate", "benchmark"), 1.0)
    return plan_steps(config, Stage(disks=disks), shape=shape, samples=samples, job_hours=hours)  # type: ignore[arg-type]


def errors(config: RunConfig, shape: ModelShape | None, disks: dict[str, int] | None = None) -> list[str]:
    return plan_of(config, shape, disks).errors


@pytest.mark.parametrize("name", chosen(PLANNED, SHORT.__contains__))
def test_every_expected_step_of_a_shipped_run_file_has_a_row_and_none_is_red(name: str) -> None:
    path, overrides = PLANNED[name]
    config = load_run_file(path, overrides)
    plan, runs = plan_config(config), config.stage_runs()
    for stage, one in plan.stages.items():
        assert one.pipeline and not one.pipeline.errors
        is_last = stage == list(runs)[-1]
        encodes = any(row.name == "cache-features" for row in one.pipeline.steps)
        graph = graph_steps(runs[stage], encodes=encodes, is_last=is_last, sweep=config.sweep if is_last else None)
        rows = [row for row in one.pipeline.steps if not row.is_job]
        assert [row.name for row in rows] == [step.name for step in graph if step.is_expected]
        assert all(row.start_s > 0 and row.disk_free_bytes > 0 for row in rows)
        has_prices = "kubeflow" not in path.stem  # a cluster's nodes have none
        assert all(bool(row.usd) == has_prices for row in rows)
        assert [row.name for row in one.pipeline.steps if row.is_job] == [
            step.name for step in graph if step.job and step.is_expected
        ]


def test_a_jobs_start_reads_its_weights_and_costs_the_machines_that_wait(seventy_b: ModelShape) -> None:
    facts, config = load_steps(), load_run_file(SEVENTY_B)
    empty_s = facts.start_s("trainer", has_gpus=True)
    jobs = {row.name: row for row in plan_of(config, seventy_b).steps if row.is_job}
    weights_s = {name: row.start_s - empty_s for name, row in jobs.items()}
    published = seventy_b.total_parameters * 2
    assert weights_s["train"] == pytest.approx(published / 0.5e9)
    assert weights_s["cache-features"] == pytest.approx(seventy_b.parameters["tower"] * 2 / 0.5e9)
    assert weights_s["evaluate"] == pytest.approx(published / 0.5e9)  # in bf16, as it is exported
    assert all(row.start_s == empty_s for row in plan_of(config, None).steps if row.is_job)


def test_a_checkpoint_fetched_whole_is_red_on_a_default_disk(
    seventy_b: ModelShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step's disk before it read the trained weights alone."""
    config = load_run_file(SEVENTY_B)
    assert not errors(config, seventy_b, disks={})

    def whole(shape: ModelShape, _model: object, _dtype: str) -> ExportSize:
        return ExportSize(0, 0, 0, checkpoint_bytes(shape.trainable_parameters, config.train), 0)

    monkeypatch.setattr(needs, "export_size", whole)
    (error,) = errors(config, seventy_b, disks={})
    assert error.startswith("step sync-checkpoint: its boot disk of 100 GB has 87 GB")
    assert re.search(r"take 8[0-9]{2} GB; set cluster.step_disks.sync-checkpoint=1[0-9]00$", error)
    assert not errors(config, seventy_b), "planned with a disk that is large enough"


def test_adapters_are_merged_into_a_base_that_is_read_where_it_lies(seventy_b: ModelShape) -> None:
    frozen = dataclasses.replace(seventy_b, frozen=frozenset(seventy_b.parameters) - {"projector"})
    config = load_run_file(SEVENTY_B)
    assert step_disks(config, shape=frozen, samples=None) == {}
    work_s = {
        name: needs.StepNeeds(config, shape, None, {}).of("sync-checkpoint").work_s
        for name, shape in (("frozen", frozen), ("trained", seventy_b))
    }
    assert work_s["frozen"] and work_s["trained"]
    assert work_s["frozen"] > 0.99 * work_s["trained"], "4 bytes of a parameter either way"


def test_a_step_that_holds_a_whole_model_gets_a_disk_of_its_own(seventy_b: ModelShape) -> None:
    hub = ["register.hub.repo_id=example/model"]
    config = load_run_file(SEVENTY_B, hub)
    found = step_disks(config, shape=seventy_b, samples=None)
    assert found == {"register-model": 200}, "in bf16"
    in_fp32 = load_run_file(SEVENTY_B, [*hub, "checkpoint.export_dtype=fp32"])
    assert step_disks(in_fp32, shape=seventy_b, samples=None) == {"register-model": 400}
    (error,) = errors(config, seventy_b, disks={})
    field, _, size = error.rpartition("; set ")[2].partition("=")
    assert not errors(load_run_file(SEVENTY_B, [*hub, f"{field}={size}"]), seventy_b), "the remedy that is printed"
    assert errors(load_run_file(SEVENTY_B, [*hub, f"{field}=100"]), seventy_b) == [error], "the run file is heeded"


def test_the_disk_of_a_job_is_planned_too(seventy_b: ModelShape) -> None:
    small = load_run_file(SEVENTY_B, ["cluster.boot_disk_size_gb=100", "cluster.evaluate_machine=null"])
    found = errors(small, seventy_b)
    assert [error.partition(":")[0] for error in found] == ["job train", "job evaluate"]
    remedies = [error.rpartition("; set ")[2].partition("=") for error in found]
    assert {field for field, _, _ in remedies} == {field := "cluster.boot_disk_size_gb"}
    size = max(int(size) for _, _, size in remedies)
    assert not errors(load_run_file(SEVENTY_B, [f"{field}={size}", "cluster.evaluate_machine=null"]), seventy_b), (
        "the remedy that is printed"
    )


@pytest.mark.parametrize(
    ("change", "needed_gb"),
    [
        ("cluster.boot_disk_size_gb=300", 350),  # 142 of weights, a quarter of 848 of the checkpoint, and shards
        ("data.shard_cache_gib=200", 570),
        ("train.strategy=hsdp", 990),  # every node holds, and resumes, the whole checkpoint
    ],
)
def test_weights_checkpoint_and_cache_of_a_training_node_share_its_disk(
    change: str, needed_gb: int, seventy_b: ModelShape
) -> None:
    assert not errors(load_run_file(SEVENTY_B), seventy_b), "four nodes resume a quarter each"
    (error,) = [one for one in errors(load_run_file(SEVENTY_B, [change]), seventy_b) if one.startswith("job train")]
    assert int(re.findall(r"take (\d+) GB", error)[0]) == pytest.approx(needed_gb, abs=8)
    remedy = error.rpartition("; set ")[2]
    assert remedy.startswith("cluster.boot_disk_size_gb=")
    changes = {remedy, change} - {"cluster.boot_disk_size_gb=300"}
    assert not errors(load_run_file(SEVENTY_B, sorted(changes)), seventy_b), "the remedy that is printed"


def test_large_images_need_the_disk_of_the_chunks_under_way() -> None:
    many = load_run_file(SEVEN_B, ["plan.sample_images=4"])
    disks = compiled_disks(many)
    assert disks == {"prepare-data": 300}
    assert [error.partition(":")[0] for error in errors(many, None, disks={})] == ["step prepare-data"]
    assert not compiled_disks(load_run_file(SEVEN_B)), "photographs of ordinary size have room on a default disk"


def test_tars_of_a_bucket_take_room_for_their_cache_as_well() -> None:
    tars = load_run_file(SEVEN_B, ["data.source=gs://bucket/train-{000..099}.tar"])
    assert compiled_disks(tars) == {"prepare-data": 200}
    assert not compiled_disks(load_run_file(SEVEN_B, ["data.source=gs://bucket/train.jsonl"]))
    assert pytest.approx(SHARE_OF_CACHE * SHARE_OF_FREE_DISK) == needs.SOURCE_CACHE


def test_images_that_do_not_fit_into_memory_are_an_error_that_names_the_field() -> None:
    (error,) = errors(load_run_file(SEVEN_B, [f"data.max_image_bytes={4 << 30}"]), None)
    assert error.startswith("step prepare-data: a machine of type e2-standard-16 has")
    assert error.endswith("lower data.max_image_bytes")


@pytest.mark.parametrize("needed_gb", [0, 50, 78, 79, 500, 5000])
def test_a_chosen_disk_holds_what_is_needed(needed_gb: int) -> None:
    size = disk_for(needed_gb * GB, "pipeline")
    assert size % 100 == 0 and size >= 100 and needed_gb <= 0.9 * (size - 13)
    assert size == 100 or needed_gb > 0.9 * (size - 100 - 13), "no larger than it must be"


def test_a_run_on_this_machine_has_no_machines_of_steps() -> None:
    plan: Plan = plan_run(load_run_file(ROOT / "configs/digits.yaml"), here=LocalMachine(2, 2**34, 2**34))
    assert plan.pipeline is None and plan.as_dict()["pipeline"] is None
