"""The entry points in their short form: every claim has figures, and both sides of it did the same work."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT

pytestmark = pytest.mark.slow  # benchmarks are no laws: make test-whole runs them

IMAGES = "600 x 400 JPEG, 224 pixels"

FOUR = ("hsdp", "tp", "tp+pp+dp")  # strategies that need four processes, or two nodes
PHOTOGRAPH = "512 x 512 JPEG"
PREPARED_IMAGE = [
    f"an image prepared: {family}" for family in ("llava (336 pixels)", "qwen2_5_vl", "smolvlm (tiles up to 1536)")
]
ACCUMULATED = {f"{count} micro-batches a step, of 2 images of a megapixel" for count in (8, 32)}
CLAIMS: dict[str, dict[str, set[str]]] = {
    "bench_data": {
        "fill: packed or padded": {"digits", "easy-vqa", "synthetic VLM mix"},
        "fill: best fit or first come": {"digits", "easy-vqa", "synthetic VLM mix"},
        "fill: best fit or first fit": {"digits", "easy-vqa", "synthetic VLM mix"},
        "samples planned": {"digits", "easy-vqa", "synthetic VLM mix"},
        "time to plan an epoch": {"digits", "easy-vqa", "synthetic VLM mix"},
        "sequences read": {"digits", "easy-vqa"},
        "sequences read, images decoded": {"digits", "easy-vqa"},
        "tokens and labels, beside tokenizing alone": {"digits", "easy-vqa"},
        "tokens and labels, beside rendering the template alone": {"digits", "easy-vqa"},
        "tokens and labels beyond tokenizing": {"digits", "easy-vqa"},
        "images of a step": {"digits", "easy-vqa", IMAGES},
        "images: all or decoding alone": {IMAGES},
        "images: ours or by hand": {IMAGES},
        "frames of a video, stored": {"1280 x 720, 25 a second"},
        "frames of a video, stored or decoded alone": {"1280 x 720, 25 a second"},
        "pictures: prepared or decoded alone": {"600 x 400 JPEG"},
        "signature within preparation": {"600 x 400 JPEG"},
        **{claim: {PHOTOGRAPH} for claim in PREPARED_IMAGE},
        "patches: one thread": {PHOTOGRAPH},
        "patches: two threads": {PHOTOGRAPH},
        "patches: the most that is possible": {PHOTOGRAPH},
        "patches a second and rank, two cores": {PHOTOGRAPH},
        "encoding job": {"8 images of 512 x 512, one torch thread"},
        "peak of the host's memory above its start": ACCUMULATED,
        "pixel values of a step": ACCUMULATED,
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
    "bench_train --only telemetry": {"telemetry as a share of a step": {"digits"}},
    "bench_train --only strategies": {
        f"step: {name} or ddp": {f"{processes} processes"}
        for processes, names in {2: ("fsdp", "zero1", "zero2", "zero3", "pp"), 4: FOUR}.items()
        for name in names
    },
    "bench_train --only features": {
        "step: EMA or none": {"ddp", "fsdp"},
        "step: full checkpointing or none": {"ddp"},
        "step: selective checkpointing or none": {"ddp"},
        "step: gradients as bf16 or none": {"ddp"},
        "step: loss in chunks or none": {"ddp, large vocabulary"},
        "step: sequence parallelism or none": {"tp"},
        "step: interleaved or none": {"pp"},
    },
}
FIGURES = {  # without a baseline
    "time to plan an epoch", "signature within preparation", *PREPARED_IMAGE,
    "peak of the host's memory above its start", "pixel values of a step",
    "tokens and labels beyond tokenizing", "training waits for data",
    "time to compile", "telemetry as a share of a step",
    "outside forward, backward, optimizer: all threads", "outside forward, backward, optimizer: training thread",
}  # fmt: skip
MAYBE = {("compiling has paid back", "digits, cached features")}  # where compiled steps are faster
FIGURES |= {claim for claim, _ in MAYBE}
EQUAL_LOSSES = "losses with unchanged gradients equal those of the baseline (relative 1e-05)"
CHECKS = {
    "bench_data": {
        "every sample is in exactly one packed sequence",
        "our loader and webdataset give the same samples with the same image bytes",
        "a stored feature is what the tower gives now",
        "as many features are read as images are decoded",
        "our pixels are those of Pillow and NumPy by hand",
        "each round has eight frames",
        "our patches are the processor's to the bit",
    },
    "bench_train --only loops layouts": {
        "the loss of every step is the same with cached and online features",
        "the loss of every step is the same in our loop and in the HF Trainer",
        "the loss of every step is the same in our loop and in a plain one",
        "the loss of each step is the same for packed and padded samples, and under a mask",
    },
    "bench_train --only attention": {"attention and its gradients are the same by sample and under a mask"},
    "bench_train --only compiled": {"compiled layers give the loss of every step (relative 0.0001)"},
    "bench_train --only telemetry": set(),
    "bench_train --only strategies": {EQUAL_LOSSES},
    "bench_train --only features": {
        EQUAL_LOSSES,
        "losses with rounded gradients stay near those of the baseline (relative 0.005)",
    },
}


def short_run(entry_point: str, folder: Path) -> dict[str, Any]:
    """What `--quick` of an entry point (with options) wrote as JSON."""
    figures, table = folder / "figures.json", folder / "table.md"
    command = [sys.executable, "-m", *f"benchmarks.{entry_point} --quick".split()]
    command += ["--json", str(figures), "--markdown", str(table), "--folder", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=580)
    assert done.returncode == 0, done.stdout + done.stderr
    content: dict[str, Any] = json.loads(figures.read_text())
    for row in content["rows"]:
        assert row["claim"] in table.read_text()
    for row in content["predictions"]:
        assert row["predicted"] == pytest.approx((1 + row["error"]) * row["measured"])
        assert row["case"] in table.read_text()
    assert content["command"].startswith(f"python -m benchmarks.{entry_point} --quick")
    assert str(figures) not in figures.read_text() + table.read_text()
    return content


@pytest.mark.parametrize("name", CLAIMS)
def test_a_short_run_gives_every_claim_with_figures_and_fairness(name: str, tmp_path: Path) -> None:
    content = short_run(name, tmp_path)
    claims = {(row["claim"], row["data"]) for row in content["rows"]}
    assert claims - MAYBE == {(claim, data) for claim, sets in CLAIMS[name].items() for data in sets}
    for row in content["rows"]:
        assert all(math.isfinite(number) and number > 0 for number in _numbers(row)), row
        assert (row["ratio"] is None) == (row["baseline"] is None) == (row["claim"] in FIGURES), row
    assert set(content["checks"]) == CHECKS[name]


def test_a_short_run_of_the_planner_predicts_what_it_measures(tmp_path: Path) -> None:
    content = short_run("bench_planner --only memory flops steps host-update", tmp_path)
    kinds = {row["what"] for row in content["predictions"]}
    assert kinds == {"memory, weights", "memory, optimizer", "memory, peak", "FLOPs", "step time"}
    for row in content["predictions"]:
        most = 0.5 if row["what"] == "step time" else 0.03  # a short run on a busy machine proves little of time
        assert abs(row["error"]) < most, row
    assert {row["data"] for row in content["rows"]} == {"AdamW", "clipping and AdamW"}


def test_a_plan_of_a_model_planned_before_takes_a_fraction_of_the_first(tmp_path: Path) -> None:
    content = short_run("bench_planner --only commands", tmp_path)
    rows = {row["claim"]: row for row in content["rows"]}
    assert rows["a plan of a model planned before"]["ratio"] > 3
    assert rows["all shipped run files compiled"]["ratio"] > 0


def test_a_save_in_the_background_stalls_less_than_one_that_waits(tmp_path: Path) -> None:
    content = short_run("bench_checkpoint --only stall overhead resume transfer", tmp_path)
    rows = {row["claim"]: row for row in content["rows"]}
    assert rows["stall of a save"]["ratio"] > 1
    assert 0 < rows["stall as a share of a waiting save"]["ours"] < 100
    assert rows["resume: find"]["ours"] < rows["resume: and load it"]["ours"]
    moved = ("upload to a folder", "upload to a bucket", "download from a bucket", "copy to a mirror")
    assert all(rows[claim]["ratio"] > 0 for claim in moved)


def test_what_is_asked_of_a_gpu_can_be_asked(tmp_path: Path) -> None:
    """On a processor, which answers what is the same there: losses. What only a GPU has gives no figure."""
    rows = short_run("on_gpu", tmp_path)["rows"]
    apart = [row["ours"] for row in rows if row["claim"].startswith("losses of")]
    assert apart and max(apart) < 1e-5
    assert not any("waits" in row["claim"] or row["claim"] == "MFU" for row in rows)


def _numbers(row: dict[str, Any]) -> list[float]:
    given = [row[name] for name in ("ours", "baseline", "ratio", "wall_ratio") if row[name] is not None]
    return [*given, *row["quartiles"], row["rounds"]]
