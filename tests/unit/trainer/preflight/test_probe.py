"""A probe's table, its calibration and its end, without a GPU."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.fakes.cuda import L4, FakeCuda
from vlmpipe.planner.time.calibration import calibration_of, latest_calibration
from vlmpipe.trainer.distributed.cluster_env import LAUNCHED_VARIABLE, REPORT_VARIABLE
from vlmpipe.trainer.errors import ExitCode, UserError
from vlmpipe.trainer.preflight import probe as probe_module
from vlmpipe.trainer.preflight.gpus import FoundGpu, FoundGpus, examine
from vlmpipe.trainer.preflight.probe import main
from vlmpipe.trainer.preflight.probe_plan import ProbePlan
from vlmpipe.trainer.sizing.calibration import Calibration, kept_name
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.records import read_record_file, write_record

MISSING = {
    "found": "GPU 1 (NVIDIA L4): a matrix product came out wrong",
    "expected": "a right one",
    "fix": "again",
    "certain": True,
}


def found(tflops: float = 61.0) -> FoundGpus:
    gpus = examine(FakeCuda(gpus=[L4, L4]), driver="560.35.03")
    return replace(gpus, gpus=tuple(replace(gpu, tflops=tflops + index) for index, gpu in enumerate(gpus.gpus)))


@pytest.fixture
def plan(tmp_path: Path) -> ProbePlan:
    return ProbePlan(
        step="probe",
        jobs=("train", "evaluate"),
        machine="g2-standard-24 with 2 x NVIDIA_L4",
        accelerator_type="NVIDIA_L4",
        accelerator_count=2,
        product_tflops=85.4,
        gpu_memory_gib=22.5,
        all_reduce_gbytes_per_s=12.0,
        write_gbytes_per_s=0.5,
        bucket_mib=1,
        run_names=("mine",),
        root_uri=str(tmp_path),
    )


@pytest.fixture
def probed(tmp_path: Path, plan: ProbePlan, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a probe with these GPUs and these findings of the launcher; the folder of its run."""
    run = tmp_path / "runs/p1"
    monkeypatch.delenv(LAUNCHED_VARIABLE, raising=False)

    def run_probe(
        gpus: FoundGpus, *missing: dict[str, Any], denied: tuple[dict[str, str], ...] = (), **changes: Any
    ) -> Path:
        plan.model_copy(update=changes).write(str(run))
        report = {"node": 0, "free_bytes": 90 << 30, "shared_memory_bytes": 8 << 30, "warnings": ["clock"]}
        found_there = {"machine": {"missing": missing}, "denied": denied}
        monkeypatch.setenv(REPORT_VARIABLE, json.dumps(report | found_there))
        for name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(probe_module, "look", lambda *, rates: gpus)
        assert main(["--config", f"{run}/run.json", "--step", "probe"]) == ExitCode.OK
        return run

    return run_probe


def test_measurements_stand_beside_the_plan(probed: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run = probed(found())
    said = capsys.readouterr().out
    assert (
        "probe of g2-standard-24 with 2 x NVIDIA_L4, the machine of train and evaluate: a job would start here" in said
    )
    rows = {
        row["what"]: (row["planned"], row["measured"]) for row in read_record_file(run / "probe/probe.json")["rows"]
    }
    assert rows["GPUs that compute"] == ("2", "2")
    assert rows["matrix products, TFLOP/s a GPU"] == ("85.4", "61"), "the slowest GPU's"
    assert rows["all-reduce in the machine, GB/s"] == ("12", "-"), "one process has nobody to add with"
    assert rows["/dev/shm, GiB"] == ("at least 1", "8") and float(rows["run's folder, read, GB/s"][1]) > 0
    assert read_record_file(run / "steps/probe.json")["state"] == "done"
    assert read_record_file(run / "preflight.json")["nodes"][0]["free_bytes"] == 90 << 30


def test_what_the_next_plan_takes_is_the_pace_of_products(probed: Any, tmp_path: Path) -> None:
    run = probed(found())
    latest_calibration.cache_clear()
    for taken in (calibration_of(str(run)), latest_calibration(str(tmp_path), "mine", "NVIDIA_L4")):
        assert taken.pace == pytest.approx(1.4) and not taken.measures_steps
        assert "a probe measured 61 TFLOP/s on NVIDIA_L4, where 85 were expected" in taken.origin


@pytest.mark.parametrize(("of_steps", "kept"), [(True, 2.0), (False, 1.4)])
def test_a_probe_never_replaces_what_steps_of_a_run_measured(
    probed: Any, tmp_path: Path, of_steps: bool, kept: float
) -> None:
    before = Calibration(2.0, "NVIDIA_L4", "earlier", of_steps=of_steps)
    write_record(open_storage(str(tmp_path)), kept_name("mine", "NVIDIA_L4"), asdict(before))
    probed(found())
    assert read_record_file(tmp_path / kept_name("mine", "NVIDIA_L4"))["pace"] == pytest.approx(kept)


def test_a_finding_of_the_launcher_ends_the_probe_after_all_is_measured(
    probed: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gpus = found()
    gpus = replace(gpus, gpus=(gpus.gpus[0], FoundGpu(*L4, fault="a matrix product came out wrong")))
    with pytest.raises(UserError, match="came out wrong") as caught:
        probed(gpus, MISSING)
    assert caught.value.code == ExitCode.MACHINE
    said = capsys.readouterr().out
    assert "a job would end here (1 missing)" in said and f"would fail: {MISSING['found']}; to do: again" in said
    assert read_record_file(tmp_path / "runs/p1/probe/probe.json")["missing"] == [MISSING]
    assert read_record_file(tmp_path / "runs/p1/steps/probe.json")["state"] == "failed"


def test_with_machine_check_warn_the_probe_says_what_jobs_warn_of_and_that_they_start(
    probed: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    probed(found(), MISSING, machine_check="warn")
    said = capsys.readouterr().out
    assert "a job would start here (1 missing, cluster.machine_check=warn)" in said and "would fail" not in said
    assert f"  missing:    {MISSING['found']}; to do: again" in said
    assert read_record_file(tmp_path / "runs/p1/steps/probe.json")["state"] == "done"


def test_addresses_that_jobs_may_not_read_end_the_probe_as_they_end_jobs(
    probed: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    denied = {"found": "no permission to read gs://questions", "expected": "a grant", "fix": "grant it"}
    with pytest.raises(UserError, match="gs://questions") as caught:
        probed(found(), denied=(denied,))
    assert caught.value.code == ExitCode.NO_PERMISSION
    assert "a job would end here (1 missing)" in capsys.readouterr().out


def test_a_probe_that_hangs_ends_within_its_time_and_says_where(
    probed: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The launcher's time counts: its look and the program's whole time are longer than the job's limit."""
    ended: list[int] = []
    timers: list[Timer] = []

    class Timer:
        def __init__(self, left_s: float, end: Callable[[], None]) -> None:
            self.left_s, self.end = left_s, end
            timers.append(self)

        def cancel(self) -> None:
            pass

    def hangs(run_uri: str) -> NoReturn:
        timers[0].end()
        raise UserError("given up", code=ExitCode.UNEXPECTED)

    monkeypatch.setattr(probe_module, "start_timer", Timer)
    monkeypatch.setattr(probe_module, "leave", ended.append)
    monkeypatch.setattr(probe_module, "_all_reduce", hangs)
    monkeypatch.setenv(LAUNCHED_VARIABLE, str(time.monotonic() - 100))
    with pytest.raises(UserError, match="given up"):
        probed(found(), limit_s=150)
    assert ended == [ExitCode.UNAVAILABLE] and 0 < timers[0].left_s <= 50
    said = "the probe did not end within 150 s of its launcher's start: it came to products measured"
    assert said in capfd.readouterr().err
