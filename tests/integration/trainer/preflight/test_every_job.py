"""Every program that a job's spec starts compares its machine first: in each, a node without its GPUs ends with 78."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.cuda import FakeCuda
from tests.support.paths import ROOT
from vlmpipe.config.run_config import RunConfig, load_run_file
from vlmpipe.job_spec.build import JOBS, job_spec, jobs_of, sweep_order
from vlmpipe.trainer.errors import ExitCode, run_main
from vlmpipe.trainer.preflight import machine
from vlmpipe.trainer.preflight.bought import VARIABLE
from vlmpipe.trainer.preflight.gpus import examine

L4 = ["cluster.machine_type=g2-standard-4", "cluster.accelerator_type=NVIDIA_L4", "cluster.accelerator_count=1"]
AUDIT = "evaluate.audit={max_samples: 5}"
BENCHMARK = 'evaluate.lmms_eval={"tasks": ["pope"], "image_uri": "us-docker.pkg.dev/p/r/lmms-eval:1"}'
PROGRAM: dict[str, Any] = {
    "name": "mine",
    "image_uri": "mine:1",
    "command": ["python", "train.py", "{model}", "{data}", "{output}"],
    "result": "opaque",
    "evaluate_command": ["python", "judge.py", "{model}"],
}


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(machine, "look", lambda **_: examine(FakeCuda()))
    for name in ("CLUSTER_SPEC", "TF_CONFIG", "PET_NNODES"):
        monkeypatch.delenv(name, raising=False)
    machine._looked_at.cache_clear()
    yield
    machine._looked_at.cache_clear()


def ended(spec: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> int:
    """Run the chief's program in this process, with the variables of its spec."""
    container = spec["worker_pool_specs"][0]["container_spec"]
    for variable in container["env"]:
        monkeypatch.setenv(variable["name"], variable["value"])
    assert VARIABLE in {variable["name"] for variable in container["env"]}
    program = importlib.import_module(container["command"][-1])
    monkeypatch.setattr(sys, "argv", [container["command"][-1], *container["args"]])
    return run_main(program.main)


def ours(job: str = "") -> RunConfig:
    file = "tests/fixtures/run_files/digits-replay.yaml" if job == "replay" else "configs/digits.yaml"
    return load_run_file(ROOT / file, [*L4, BENCHMARK, AUDIT])


def external() -> RunConfig:
    content = ours().to_dict()
    content["train"]["trainer"] = PROGRAM
    content["features"]["cache"], content["evaluate"]["lmms_eval"] = "off", None
    return RunConfig.model_validate(content)


@pytest.mark.parametrize("job", JOBS)
def test_a_job_of_our_own_ends_first_thing(
    job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert job in jobs_of(ours(job))
    assert ended(job_spec(ours(job), job, str(tmp_path)), monkeypatch) == ExitCode.MACHINE
    assert "1 x NVIDIA_L4 (g2-standard-4) is paid for, and torch sees none" in capfd.readouterr().err


@pytest.mark.parametrize("job", ["train", "evaluate"])
def test_so_does_a_job_of_another_trainer(job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = job_spec(external(), job, str(tmp_path))
    assert "external" in spec["worker_pool_specs"][0]["container_spec"]["command"][-1]
    assert ended(spec, monkeypatch) == ExitCode.MACHINE


def test_so_does_a_job_of_a_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ended(sweep_order(ours(), str(tmp_path), 0).spec(), monkeypatch) == ExitCode.MACHINE
    assert (tmp_path / "steps").is_dir(), "the sweep's own record says why"
