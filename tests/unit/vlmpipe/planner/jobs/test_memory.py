"""Memory of the jobs beside training: planned for every shipped run file, and red where a job cannot run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from vlmpipe.config.run_config import RunConfig, load_run_file
from vlmpipe.job_spec.build import jobs_of
from vlmpipe.planner.jobs.memory import JobMemory, memory_beside_training
from vlmpipe.planner.memory.components import MemoryPart
from vlmpipe.planner.plan import plan_basis
from vlmpipe.planner.workload import is_cached

SHIPPED = sorted(
    path
    for folder in ("configs", "recipes", "examples")
    for path in (ROOT / folder).rglob("*.yaml")
    if "\ntrain:" in path.read_text("utf-8")
    # Models that are not at hand: of a few layers, which a recipe makes first, of another run, or in a bucket.
    and not re.search(r"build/|gs://example-bucket/models|\"run:", path.read_text("utf-8"))
)
GIB = 2**30
BIG, SMALL = ROOT / "configs/llava-70b.yaml", ROOT / "configs/llava-7b.yaml"
L4 = "cluster.evaluate_machine={machine_type: g2-standard-12, accelerator_type: NVIDIA_L4, accelerator_count: 1}"


def planned(config: RunConfig) -> dict[str, JobMemory]:
    model, load, _ = plan_basis(config)
    shape = load.sized(model.shape)
    return {one.job: one for one in memory_beside_training(config, shape, load, encodes=is_cached(config))}


def errors(path: Path, *overrides: str) -> list[str]:
    return [text for one in planned(load_run_file(path, overrides)).values() for text in one.errors()]


def runs(path: Path) -> Iterator[RunConfig]:
    config = load_run_file(path)
    yield from config.stage_runs().values()


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_job_of_a_shipped_run_file_has_memory_and_fits(path: Path) -> None:
    for config in runs(path):
        found = planned(config)
        asked = {"evaluate"} if not (config.train.trainer and config.train.trainer.evaluate_command) else set()
        made = {"cache_features"} if is_cached(config) else set()
        assert found.keys() >= asked | made | (set(jobs_of(config)) - {"train", "evaluate", "cache_features"})
        assert [text for one in found.values() for text in one.errors()] == []
        assert [text for one in found.values() for text in one.doubts()] == []
        assert all(one.total_bytes or one.host for one in found.values())


def test_shipped_run_files_are_found() -> None:
    assert len(SHIPPED) > 20 and BIG in SHIPPED


def test_a_model_that_no_gpu_holds_is_red_and_the_named_setting_fits() -> None:
    (error,) = errors(BIG, "cluster.evaluate_machine=null")
    assert "job evaluate does not fit" in error and "weights (132.1 GiB, bf16)" in error
    remedy = shlex.split(error.partition("it fits with ")[2])
    assert "processes_per_replica" in remedy[-1]
    assert errors(BIG, *remedy) == []


def test_a_batch_that_is_too_large_is_red_and_the_named_setting_fits() -> None:
    path = ROOT / "configs/qwen2-5-vl-7b-qlora.yaml"
    (error,) = errors(path, "evaluate.batch_questions=64")
    remedy = shlex.split(error.partition("it fits with ")[2])
    assert re.fullmatch(r"evaluate.batch_questions=[0-9]+", remedy[0])
    assert errors(path, *remedy) == []


def test_a_7b_trained_in_bf16_is_evaluated_on_an_l4_and_one_trained_in_fp32_is_not() -> None:
    assert errors(SMALL, L4, "evaluate.batch_questions=8") == []
    (error,) = errors(SMALL, L4, "evaluate.batch_questions=8", "train.precision=fp32")
    assert "26.3 GiB, fp32" in error and "larger or more GPUs" in error


def test_a_job_near_the_limit_is_looked_at_as_training_is() -> None:
    """Within 2 % above, the estimate's own error, it may run; below 5 % of spare memory it may not."""
    capacity = 80 * GIB

    def job(share: float) -> JobMemory:
        part = MemoryPart("weights", round(share * capacity), "bf16")
        return JobMemory("evaluate", "H100", 1, capacity, (part,), None, remedy="ask fewer questions at once")

    said = {share: ([*job(share).doubts()], bool([*job(share).errors()])) for share in (0.94, 0.96, 1.01, 1.03)}
    assert said[0.94] == ([], False)
    assert said[0.96] == (["job evaluate has only 3.2 GiB of memory to spare"], False)
    near = "job evaluate takes 1.0% more memory than there is, within the error of the estimate, 2%"
    assert said[1.01] == ([f"{near}; ask fewer questions at once"], False)
    assert said[1.03] == ([], True)


def test_a_setting_that_is_named_has_room() -> None:
    """Of fewer ranks those are named with which more is spare than the estimate may be wrong."""
    overrides = ["cluster.evaluate_machine.processes_per_replica=4"]
    assert [*planned(load_run_file(BIG, overrides))["evaluate"].doubts()]
    (error,) = errors(BIG, "cluster.evaluate_machine=null")
    assert [*planned(load_run_file(BIG, shlex.split(error.partition("it fits with ")[2])))["evaluate"].doubts()] == []


def test_host_memory_counts_the_copies_of_all_ranks() -> None:
    of_eight, of_two = planned(load_run_file(BIG, ["cluster.evaluate_machine=null"])), planned(load_run_file(BIG))
    eight, two = (one["evaluate"].host for one in (of_eight, of_two))
    assert eight and two
    assert eight.total_bytes == 4 * two.total_bytes
    adapter = load_run_file(ROOT / "configs/llava-7b-lora.yaml", ["model.lora.export=merged"])
    assert planned(adapter)["evaluate"].host


def test_spreading_takes_less_of_each_gpu() -> None:
    found = [
        planned(load_run_file(BIG, [f"cluster.evaluate_machine.processes_per_replica={ranks}"]))["evaluate"]
        for ranks in (4, 2)
    ]
    assert [one.devices for one in found] == [2, 3]
    weights = [next(part.bytes for part in one.parts if part.name == "weights") / GIB for one in found]
    assert weights[0] == pytest.approx(132.1 / 2, rel=0.05) and weights[1] == pytest.approx(132.1 / 3, rel=0.05)
