"""The benchmarks run in their short form: every claim has figures, and both sides of it did the same work."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.report import Report, Side, UnfairError
from tests.support.paths import ROOT
from tests.support.short_form import chosen, only_whole

pytestmark = only_whole  # benchmarks are no laws: make test-whole runs them

IMAGES = "600 x 400 JPEG, 224 pixels"

FOUR = ("hsdp", "tp", "tp+pp+dp")  # strategies that need four processes, or two nodes
CLAIMS: dict[str, dict[str, set[str]]] = {
    "bench_data": {
        "fill: packed or padded": {"digits", "easy-vqa", "synthetic VLM mix"},
        "fill: best fit or first come": {"digits", "easy-vqa", "synthetic VLM mix"},
        "fill: best fit or first fit": {"digits", "easy-vqa", "synthetic VLM mix"},
        "samples planned": {"digits", "easy-vqa", "synthetic VLM mix"},
        "time to plan an epoch": {"digits", "easy-vqa", "synthetic VLM mix"},
        "rows read": {"digits", "easy-vqa"},
        "rows read, images decoded": {"digits", "easy-vqa"},
        "images of a step": {"digits", "easy-vqa", IMAGES},
        "images: all or decoding alone": {IMAGES},
        "images: ours or by hand": {IMAGES},
        "preparation": {"digits", "easy-vqa"},
    },
    "bench_train --only loops layouts": {
        "step: cached or online": {"digits"},
        "step: ours or HF Trainer": {"digits"},
        "step: ours cached or HF Trainer": {"digits"},
        "step: ours or a plain loop": {"digits"},
        "gain of cached features: measured or planned": {"digits"},
        "outside forward, backward, optimizer: all threads": {"digits"},
        "outside forward, backward, optimizer: training thread": {"digits"},
        "training waits for data": {"digits"},
        "step: packed or padded": {"digits"},
        "step: by sample or under a mask": {"digits"},
        "fill of these steps": {"digits"},
    },
    "bench_train --only attention": {
        claim: {"4 samples in 512 tokens, 8 heads of 64"}
        for claim in ("attention: forward", "attention: forward and backward")
    },
    "bench_train --only compiled": {
        "step: compiled or eager": {"digits, cached features"},
        "time to compile": {"digits, cached features"},
    },
    "bench_train --only strategies": {
        f"step: {name} or ddp": {f"{processes} processes"}
        for processes, names in {2: ("fsdp", "zero1", "zero2", "zero3", "tp", "pp"), 4: FOUR}.items()
        for name in names
    },
    "bench_train --only features": {
        "step: EMA or none": {"ddp", "fsdp"},
        "step: full checkpointing or none": {"ddp"},
        "step: selective checkpointing or none": {"ddp"},
        "step: gradients as bf16 or none": {"ddp"},
        "step: gradients by PowerSGD or none": {"ddp"},
        "step: loss in chunks or none": {"ddp, large vocabulary"},
        "step: sequence parallelism or none": {"tp"},
        "step: interleaved or none": {"pp"},
    },
}
FIGURES = {  # without a baseline
    "time to plan an epoch", "preparation", "training waits for data", "time to compile",
    "outside forward, backward, optimizer: all threads", "outside forward, backward, optimizer: training thread",
}  # fmt: skip
EQUAL_LOSSES = "losses that gradients as they are give equal those of the baseline (relative 1e-05)"
CHECKS = {
    "bench_data": {
        "every sample is in exactly one row",
        "our loader and webdataset give the same samples with the same image bytes",
        "a stored feature is what the tower gives now",
        "as many features are read as images are decoded",
        "our pixels are those of Pillow and NumPy by hand",
    },
    "bench_train --only loops layouts": {
        "the loss of every step is the same with cached and online features",
        "the loss of every step is the same in our loop and in the HF Trainer",
        "the loss of every step is the same in our loop and in a plain one",
        "the loss of each step is the same for packed and padded samples, and under a mask",
    },
    "bench_train --only attention": {"attention and its gradients are the same by sample and under a mask"},
    "bench_train --only compiled": {"compiled layers give the loss of every step (relative 0.0001)"},
    "bench_train --only strategies": {EQUAL_LOSSES},
    "bench_train --only features": {
        EQUAL_LOSSES,
        "losses with rounded gradients stay near those of the baseline (relative 0.005)",
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", chosen(CLAIMS, lambda name: name in ("bench_data", "bench_train --only attention")))
def test_a_short_run_gives_every_claim_with_figures_and_fairness(name: str, tmp_path: Path) -> None:
    figures, table = tmp_path / "figures.json", tmp_path / "table.md"
    command = [sys.executable, "-m", *f"benchmarks.{name} --quick".split()]
    command += ["--json", str(figures), "--markdown", str(table)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads(figures.read_text())
    assert {(row["claim"], row["data"]) for row in content["rows"]} == {
        (claim, data) for claim, sets in CLAIMS[name].items() for data in sets
    }
    for row in content["rows"]:
        assert all(math.isfinite(number) and number > 0 for number in _numbers(row)), row
        assert (row["ratio"] is None) == (row["baseline"] is None) == (row["claim"] in FIGURES), row
        assert row["claim"] in table.read_text()
    assert set(content["checks"]) == CHECKS[name]
    assert content["command"] == f"python -m benchmarks.{name} --quick"
    assert str(tmp_path) not in figures.read_text() + table.read_text()


@only_whole
@pytest.mark.slow
def test_a_short_run_of_the_planner_predicts_what_it_measures(tmp_path: Path) -> None:
    figures, table = tmp_path / "figures.json", tmp_path / "table.md"
    command = [sys.executable, "-m", "benchmarks.bench_planner", "--quick"]
    command += ["--json", str(figures), "--markdown", str(table)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads(figures.read_text())
    kinds = {row["what"] for row in content["rows"]}
    assert kinds == {"memory, weights", "memory, optimizer", "memory, peak", "FLOPs", "step time"}
    for row in content["rows"]:
        assert row["predicted"] == pytest.approx((1 + row["error"]) * row["measured"])
        most = 0.5 if row["what"] == "step time" else 0.03  # a short run on a busy machine proves little of time
        assert abs(row["error"]) < most, row
        assert row["case"] in table.read_text()
    assert content["command"] == "python -m benchmarks.bench_planner --quick"
    assert str(tmp_path) not in figures.read_text() + table.read_text()


def test_a_comparison_that_is_not_fair_gives_no_figures() -> None:
    report = Report("test", {})
    with pytest.raises(UnfairError, match="the same losses"):
        report.require(False, "the same losses")
    assert report.checks == []


def test_a_ratio_is_the_median_of_each_rounds_own() -> None:
    report = Report("test", {})
    # The second round was slow for both sides: that is the machine, and no round says anything but two.
    report.compare("claim", "data", "samples / CPU s", Side("ours", [10, 2, 12]), Side("theirs", [5, 1, 6]))
    (row,) = report.rows
    assert (row.ratio, row.quartiles, row.ours, row.baseline) == (2.0, (2.0, 2.0), 10, 5)


def _numbers(row: dict[str, Any]) -> list[float]:
    given = [row[name] for name in ("ours", "baseline", "ratio", "wall_ratio") if row[name] is not None]
    return [*given, *row["quartiles"], row["rounds"]]


@only_whole
@pytest.mark.slow
def test_a_short_run_of_the_checkpoint_bench_stalls_less_than_a_save_that_waits(tmp_path: Path) -> None:
    output = tmp_path / "checkpoint.json"
    command = [sys.executable, "-m", "benchmarks.bench_checkpoint", "--quick", "--json", str(output)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=200)
    rows = {row["claim"]: row for row in json.loads(output.read_text())["rows"]}
    assert rows["stall of a save"]["ratio"] > 1
    assert 0 < rows["stall as a share of a waiting save"]["ours"] < 100
    assert rows["resume: resolve"]["ours"] < rows["resume: and load it"]["ours"]
    moved = ("upload to a folder", "upload to a bucket", "download from a bucket", "copy to a mirror")
    assert all(rows[claim]["ratio"] > 0 for claim in moved)


@only_whole
@pytest.mark.slow
def test_a_plan_of_what_was_planned_before_takes_a_fraction_of_the_first(tmp_path: Path) -> None:
    output = tmp_path / "commands.json"
    command = [sys.executable, "-m", "benchmarks.bench_commands", "--quick", "--json", str(output)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=200)
    rows = {row["claim"]: row for row in json.loads(output.read_text())["rows"]}
    assert rows["a plan of what was planned before"]["ratio"] > 3
    assert rows["all shipped run files compiled"]["ratio"] > 0


@only_whole
@pytest.mark.slow
def test_what_is_asked_of_a_gpu_can_be_asked(tmp_path: Path) -> None:
    """On a processor, which answers what is the same there: losses. What only a GPU has gives no figure."""
    output = tmp_path / "gpu.json"
    command = [sys.executable, "-m", "benchmarks.on_gpu", "--quick", "--json", str(output)]
    subprocess.run(
        command, cwd=ROOT, env=os.environ | {"LOCAL_RANK": "0"}, check=True, capture_output=True, timeout=280
    )
    rows = json.loads(output.read_text())["rows"]
    apart = [row["ours"] for row in rows if row["claim"].startswith("losses of")]
    assert apart and max(apart) < 1e-5
    assert not any("waits" in row["claim"] or row["claim"] == "MFU" for row in rows)


@only_whole
@pytest.mark.slow
def test_the_rate_of_an_update_in_memory_is_measured(tmp_path: Path) -> None:
    output = tmp_path / "update.json"
    command = [sys.executable, "-m", "benchmarks.host_update", "--quick", "--json", str(output)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    rows = json.loads(output.read_text())["rows"]
    assert {row["data"] for row in rows} == {"AdamW", "clipping and AdamW"} and all(row["ours"] > 0 for row in rows)


@only_whole
def test_a_run_that_memory_has_no_room_for_goes_on_with_the_same_losses(tmp_path: Path) -> None:
    output = tmp_path / "found.json"
    command = [sys.executable, "-m", "benchmarks.disk_offload", "--quick", "--json", str(output)]
    subprocess.run([*command, "--folder", str(tmp_path / "disk")], check=True, timeout=600)
    found = json.loads(output.read_text())
    if "limited" not in found:
        pytest.skip("no right to make a control group")
    assert found["limited"]["memory"] is None, "the system was to kill it"
    assert found["limited"]["disk"]["losses"] == found["memory"]["losses"] == found["disk"]["losses"]
