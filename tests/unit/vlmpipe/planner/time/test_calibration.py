"""Plans by what an earlier run measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.planner.configs import A100_80, H100, LLAVA_7B, machine, run_config
from vlmpipe.catalog.machines import Gpu
from vlmpipe.planner.parallel_layout import layout_of
from vlmpipe.planner.scenario import Scenario
from vlmpipe.planner.time import step_time
from vlmpipe.planner.time.calibration import Calibration, calibration_of, keep_calibration, latest_calibration
from vlmpipe.planner.time.step_time import Time, estimate_time
from vlmpipe.planner.workload import Workload
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.records import read_record, seal_lines, write_record

WARM_UP_S = 100.0


def planned(gpu: Gpu = A100_80, **run: Any) -> Time:
    config = run_config(cluster__accelerator_type=gpu.accelerator_type, **run)
    load = Workload.assumed(config, LLAVA_7B)
    return estimate_time(Scenario(config, LLAVA_7B, layout_of(config), load, machine(), gpu))


def finished_run(folder: Path, time: Time, step_s: Sequence[float]) -> str:
    """A folder as a run leaves it: planned as `time`, and measured."""
    store = open_storage(str(folder))
    plan = {
        "name": "test",
        "time": {"step_s": time.step_s, "pace": time.pace},
        "jobs": {"train": [{"accelerator_type": A100_80.accelerator_type}]},
    }
    write_record(store, "plan.json", plan)
    lines = [{"step": number + 1, "step_s": seconds} for number, seconds in enumerate((WARM_UP_S, *step_s))]
    store.write("metrics.jsonl", seal_lines(lines))
    return str(folder)


def test_the_next_plan_takes_the_pace_of_the_last_run_and_so_does_the_one_after(tmp_path: Path) -> None:
    first = planned()
    assert first.step_s is not None
    took = 1.3 * first.step_s
    second = planned(plan__calibrate_from=finished_run(tmp_path / "one", first, [took, took, 9 * took, took]))
    assert second.step_s == pytest.approx(took, rel=0.01)  # checkpoints are not slower
    third = planned(plan__calibrate_from=finished_run(tmp_path / "two", second, [took] * 4))
    assert third.step_s == pytest.approx(took, rel=0.01)  # not 1.3 times slower again
    assert any("1.30 of their forecast" in said for said in second.assumptions)


def test_a_run_on_other_gpus_calibrates_nothing_and_is_named(tmp_path: Path) -> None:
    plain = planned(H100)
    assert plain.step_s is not None
    other = planned(H100, plan__calibrate_from=finished_run(tmp_path, plain, [3 * plain.step_s] * 5))
    assert other.step_s == plain.step_s and other.interval == plain.interval
    assert any("Not calibrated" in said and "NVIDIA_A100_80GB" in said for said in other.assumptions)


def test_a_measured_pace_has_the_narrower_range(tmp_path: Path) -> None:
    first = planned()
    assert first.step_s is not None and first.interval is not None
    second = planned(plan__calibrate_from=finished_run(tmp_path, first, [first.step_s] * 5)).interval
    assert second is not None and second.high - second.low < first.interval.high - first.interval.low


def test_a_folder_without_a_measured_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"plan.json and metrics.jsonl are not there"):
        planned(plan__calibrate_from=str(tmp_path))
    with pytest.raises(ConfigError, match="2 logged steps"):
        planned(plan__calibrate_from=finished_run(tmp_path / "short", planned(), [1.0, 1.0]))


def test_a_run_keeps_its_pace_for_the_next_one_of_its_name_on_its_gpus(tmp_path: Path) -> None:
    first, root = planned(), str(tmp_path)
    assert first.step_s is not None
    keep_calibration(finished_run(tmp_path / "runs/one", first, [1.3 * first.step_s] * 4))
    kept = read_record(open_storage(root), f"calibrations/test/{A100_80.accelerator_type}.json")
    assert kept["pace"] == pytest.approx(1.3, rel=0.01)
    found = latest_calibration(root, "test", A100_80.accelerator_type)
    assert found == calibration_of(f"{root}/runs/one")
    for other in (("another", A100_80.accelerator_type), ("test", H100.accelerator_type)):
        none = latest_calibration(root, *other)
        assert none.pace == 1 and "no run of" in none.origin


def test_a_run_without_measured_steps_keeps_nothing(tmp_path: Path) -> None:
    keep_calibration(finished_run(tmp_path / "runs/one", planned(), [1.0]))
    keep_calibration(str(tmp_path / "runs/two"))
    assert open_storage(str(tmp_path)).list("calibrations") == []


def test_latest_reads_what_lies_under_the_root_of_cloud_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def latest(*of: str) -> Calibration:
        asked.append(of)
        return Calibration(2.0, A100_80.accelerator_type, "twice as long")

    monkeypatch.setattr(step_time, "latest_calibration", latest)
    plain, slower = planned(), planned(plan__calibrate_from="latest")
    assert plain.step_s is not None and slower.step_s == pytest.approx(2 * plain.step_s, rel=0.01)
    config = run_config()
    assert asked == [(config.bucket_root_uri, config.name, A100_80.accelerator_type)]
