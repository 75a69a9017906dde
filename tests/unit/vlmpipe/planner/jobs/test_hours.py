"""Planned hours, memory and disk of the job audit."""

from __future__ import annotations

from functools import cache

import pytest

from tests.support.paths import ROOT
from vlmpipe.catalog.machines import Gpu
from vlmpipe.config.run_config import RunConfig, load_run_file
from vlmpipe.planner.jobs.hours import audit_hours, evaluation_gpu
from vlmpipe.planner.jobs.memory import JobMemory, memory_beside_training
from vlmpipe.planner.jobs.nodes import nodes_of
from vlmpipe.planner.model_architecture import Architecture, architecture
from vlmpipe.planner.parallel_layout import layout_of
from vlmpipe.planner.prepared_workload import planned_workload
from vlmpipe.planner.scenario import Scenario
from vlmpipe.planner.steps.needs import StepNeeds, all_samples
from vlmpipe.planner.time.step_time import estimate_time
from vlmpipe.trainer.config.job import RunPaths

PATH = ROOT / "configs/llava-7b.yaml"
A100 = "cluster.evaluate_machine={{machine_type: a2-ultragpu-{0}g, accelerator_type: NVIDIA_A100_80GB, " \
    "accelerator_count: {0}}}"  # fmt: skip


def config_of(*overrides: str, audit: str = "{}") -> RunConfig:
    return load_run_file(PATH, [f"evaluate.audit={audit}", *overrides])


@cache
def model_of() -> Architecture:
    return architecture(load_run_file(PATH))


def case_of(config: RunConfig) -> Scenario:
    model, load = model_of(), planned_workload(config, model_of(), RunPaths(run_id="r1", root_uri="root"))[0]
    nodes = nodes_of(config, "train", None)
    assert nodes.machine and isinstance(nodes.device, Gpu)
    return Scenario(config, load.sized(model.shape), layout_of(config), load, nodes.machine, nodes.device)


def hours_of(*overrides: str, audit: str = "{}") -> float:
    hours = audit_hours(case_of(config_of(*overrides, audit=audit)))
    assert hours is not None
    return hours


def memory_of(config: RunConfig) -> JobMemory:
    case = case_of(config)
    jobs = memory_beside_training(config, case.shape, case.load, encodes=False)
    return next(memory for memory in jobs if memory.job == "audit")


def test_ranks_share_the_losses_and_samples_bound_them() -> None:
    samples = all_samples(case_of(config_of()).load.samples, config_of().data.validation_fraction)
    assert samples
    one = hours_of(A100.format(1))
    assert hours_of(A100.format(8)) == pytest.approx(one / 8)
    assert hours_of(A100.format(1), audit=f"{{max_samples: {samples // 4}}}") == pytest.approx(one / 4, rel=1e-4)
    assert hours_of(A100.format(8), "cluster.replica_count=2") == hours_of(A100.format(8)), "it has one machine"
    assert hours_of(audit="null") == 0


def test_three_forward_passes_take_about_an_epochs_computing() -> None:
    case = case_of(config_of("train.epochs=1"))
    time = estimate_time(case)
    assert time.steps and evaluation_gpu(case.config, case.gpu) == case.gpu, "the machine of training"
    epoch_hours = next(part.s for part in time.parts if part.name == "computing") * time.steps / 3600
    assert 0.75 * epoch_hours < hours_of("train.epochs=1") < epoch_hours
    assert hours_of("train.epochs=3") == pytest.approx(hours_of("train.epochs=1"))


def test_memory_is_that_of_a_sequence_and_the_logits_of_a_part_of_its_labels() -> None:
    few, many = (memory_of(config_of(f"train.loss_chunk_tokens={tokens}")) for tokens in (256, 1024))
    parts = [{part.name: part.bytes for part in memory.parts} for memory in (few, many)]
    assert parts[1]["logits of a loss"] == 4 * parts[0]["logits of a loss"]
    assert {**parts[0], "logits of a loss": 0} == {**parts[1], "logits of a loss": 0}
    assert few.fits and few.total_bytes < parts[0]["weights"] * 1.5
    copies = [memory_of(config_of(A100.format(ranks))).host for ranks in (2, 8)]
    assert copies[0] and copies[1] and copies[1].total_bytes == 4 * copies[0].total_bytes


def test_the_disk_holds_a_checkpoint_that_is_exported_next_to_the_weights() -> None:
    config = config_of()
    needs = StepNeeds(config, case_of(config).shape, 1000, {})
    disk, why = needs.of_job("audit")
    assert disk == needs.weights_bytes("audit") + needs.of("sync-checkpoint").disk_bytes
    assert why == "a checkpoint's export, and one file of it"
