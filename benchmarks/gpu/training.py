"""Part `training` of `benchmarks.on_gpu`: the training, encoding and evaluation jobs as the launcher starts them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.gpu.run import each
from benchmarks.support.report import Side
from benchmarks.support.suite import Bench
from tests.support.paths import ROOT
from tests.support.trainer.memory_cases import BF16
from tests.support.trainer.runs import losses, make_run
from vlmpipe.trainer.checkpoint.fault_points import VARIABLE
from vlmpipe.trainer.checkpoint.sync import sync_run
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.records import read_record

TRAIN, ENCODE, EVALUATE = (
    "vlmpipe.trainer.train",
    "vlmpipe.trainer.feature_cache.encode",
    "vlmpipe.trainer.evaluation.evaluate",
)
ON_HOST = {"CUDA_VISIBLE_DEVICES": ""}
SAVE_AT = 6  # steps
SETTINGS = {"train.epochs": 10, "train.checkpoint_every_steps": SAVE_AT, "train.compile": "off"}
RESUMED: dict[str, dict[str, Any]] = {
    "ddp": {},
    "ddp bf16": BF16,
    "fsdp bf16": BF16 | {"train.strategy": "fsdp"},
    "zero2 bf16": BF16 | {"train.strategy": "zero2"},
    "zero3 bf16": BF16 | {"train.strategy": "zero3"},
}
JOBS_AT_ONCE = 6


def training(bench: Bench) -> None:
    """Of a run in fp32 the losses and answers of the device beside the host's; and of each strategy the losses of a run
    that was killed after a checkpoint and went on, beside those of one that was not."""
    device, host = (made(bench.scratch / name, "whole", {}) for name in ("device", "host"))
    with ThreadPoolExecutor() as pool:
        list(pool.map(encode_and_train, (device, host), ({}, ON_HOST)))
    figure = bench.report.figure
    apart = max(abs(one / other - 1) for one, other in zip(losses(device), losses(host), strict=True))
    figure(
        f"device and host: losses of {len(losses(host))} steps", "digits", "largest difference", Side("ddp", [apart])
    )
    sync_run(device)
    run(EVALUATE, device, {})
    on_device = scores_of(device)
    run(EVALUATE, device, ON_HOST)
    on_host = scores_of(device)
    apart = max(abs(on_device[name] - on_host[name]) for name in on_host)
    claim = f"one model evaluated on device and host: {', '.join(on_host)}"
    figure(claim, "digits", "largest difference", Side("ddp", [apart]))
    names = [name for name, _ in each(bench, RESUMED, 1)]
    run(ENCODE, made(bench.scratch / "device", "encoded", BF16), {})
    with ThreadPoolExecutor(JOBS_AT_ONCE) as pool:
        found = list(pool.map(lambda name: resumed(bench.scratch / "device", name), names))
    for name, differ in zip(names, found, strict=True):
        figure("killed after a checkpoint and resumed: losses that differ", "digits", "steps", Side(name, [differ]))


def encode_and_train(job: JobConfig, environment: Mapping[str, str]) -> None:
    for module in (ENCODE, TRAIN):
        run(module, job, environment)


def made(root: Path, name: str, changes: dict[str, Any]) -> JobConfig:
    root.mkdir(exist_ok=True)
    return make_run(root, name, {**SETTINGS, **changes})


def resumed(root: Path, name: str) -> int:
    """Steps of which the loss is another than in a run that was not killed."""
    whole, other = (made(root, f"{name} {how}".replace(" ", "-"), RESUMED[name]) for how in ("whole", "resumed"))
    run(TRAIN, whole, {})
    killed = start(TRAIN, other, {VARIABLE: "after COMMIT"})
    if killed.returncode == 0:
        raise RuntimeError(f"{name}: was not killed\n{killed.stdout[-2000:]}")
    run(TRAIN, other, {})
    pairs = list(zip(losses(whole), losses(other), strict=True))
    assert len(pairs) > SAVE_AT
    return sum(one != another for one, another in pairs)


def scores_of(job: JobConfig) -> dict[str, float]:
    """Loss and exact match of the evaluation split."""
    content = read_record(open_storage(job.run.run_uri), "evaluate.json")
    return {name: float(content[name]) for name in ("loss", "exact_match")}


def run(module: str, job: JobConfig, environment: Mapping[str, str]) -> None:
    ended = start(module, job, environment)
    if ended.returncode:
        raise RuntimeError(f"{module} ended with {ended.returncode}\n{ended.stdout[-6000:]}")


def start(module: str, job: JobConfig, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "vlmpipe.trainer.launch",
            "--",
            module,
            "--config",
            f"{job.run.run_uri}/run.json",
        ],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=180,
        encoding="utf-8",
        errors="replace",
    )
