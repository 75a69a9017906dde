"""What `make bench-gpu` takes for granted, which a processor can show."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.gpu.copies import RANKS, hf_run
from benchmarks.gpu.losses import ALONE, wait_of
from benchmarks.gpu.run import TINY, alone, case_of
from benchmarks.gpu.speed import peak_flops
from benchmarks.support.processes import call
from benchmarks.support.tiny_run import TinyRun
from tests.support.drivers.train_alone import MARK
from tests.support.short_form import chosen
from tests.support.trainer.memory_cases import IN_8_BITS
from tests.support.trainer.runs import run_ranks
from vlmpipe.trainer.distributed.process import start_worker

pytestmark = pytest.mark.slow  # benchmarks are no laws: make test-whole runs them

RUNS = {name: name for name in (*ALONE, "zero2:optimizer", "zero3:optimizer")}
TRIED = chosen(RUNS, lambda name: name in ("ddp", "fsdp", "zero3"))


def test_after_a_measurement_nothing_of_its_run_is_alive() -> None:
    """Whether it came to its end or not."""
    said = run_ranks("tests.support.drivers.train_alone", ["--runs", *TRIED], processes=1)
    line = next(line for line in said.splitlines() if line.startswith(MARK))
    assert json.loads(line.removeprefix(MARK)) == {name: [[], []] for name in TRIED}


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H200", 989.5),
        ("NVIDIA A100-SXM4-40GB", 312),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100-PCIE-40GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA B200", 2250),
        ("NVIDIA L4", 121),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 467.8),
    ],
)
def test_the_peak_of_a_gpu_is_the_catalogues(name: str, tflops: float) -> None:
    assert peak_flops(name) == tflops * 1e12


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA H100 PCIe",
        "NVIDIA H100 NVL",
        "NVIDIA H200 NVL",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA GeForce RTX 4090",
        "NVIDIA RTX 6000 Ada Generation",
        "NVIDIA L40S",
        "NVIDIA GH200 480GB",
        "Tesla T4",
        "Some GPU",
    ],
)
def test_a_gpu_that_is_not_in_the_catalogue_has_no_peak(name: str) -> None:
    assert peak_flops(name) is None


def test_copies_of_a_tower_on_tensor_parallel_ranks_can_be_compared(tmp_path: Path) -> None:
    config = hf_run(tmp_path, steps=2)
    arguments = {"config": config, "combined": True}
    assert call("benchmarks.gpu.copies:largest_apart", arguments, ranks=RANKS) == 0.0
    assert call("benchmarks.gpu.copies:largest_apart", arguments | {"combined": False}, ranks=RANKS) < 1e-5


def test_a_step_after_a_resume_with_8_bit_moments_can_be_watched() -> None:
    """Without a GPU there is nothing to see: the run goes on after its state was saved and loaded."""
    said = call("tests.integration.benchmarks.test_gpu:losses_around_a_resume", {})
    assert said["resumed"] == said["straight"]


def losses_around_a_resume() -> dict[str, list[float]]:
    """Of the steps after two, with and without a save and a load between."""
    worker, found = start_worker(), {}
    for name in ("straight", "resumed"):

        def steps(run: TinyRun, *, resumes: bool = name == "resumed") -> list[float]:
            assert wait_of(run, resumes=resumes) is None
            return [float(run.step()) for _ in range(2)]

        found[name] = alone(steps, case_of(TINY, "fsdp", IN_8_BITS), TINY, worker)
    return {"straight": found["straight"][1:], "resumed": found["resumed"][:1]}
