"""recipes/plain: a train.py with DDP under torchrun, from prepared data to an export that transformers loads."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForImageTextToText, AutoProcessor

from tests.support.paths import ROOT
from tests.support.trainer.external_runs import ExternalRun, lose_machine, wait_for_step
from vlmpipe.components.runtime.prepared_data import prepare_run
from vlmpipe.components.runtime.resolve import open_run_folder
from vlmpipe.components.runtime.run_results import sync_model
from vlmpipe.config.run_config import load_run_file
from vlmpipe.job_spec.worker_pools import STEP_LABEL
from vlmpipe.platforms.local.jobs.job import run_job
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.errors import ExitCode
from vlmpipe.trainer.progress import Progress

STEPS = 200


def plain_run(root: Path, run_id: str, *, steps: int) -> ExternalRun:
    """A run of the recipe with little data, prepared."""
    changes = [f"train.max_steps={steps}", "train.checkpoint_every_steps=2", "train.global_batch_size=4"]
    config = load_run_file(ROOT / "recipes/plain/run.yaml", [*changes, "data.max_samples=60"])
    run_uri = open_run_folder(json.dumps(config.to_dict()), str(root), run_id=run_id)
    job = JobConfig.load(f"{run_uri}/run.json")
    prepare_run(job, Progress(run_uri, "prepare-data", quiet=True))
    return ExternalRun(root, job)


def start(run: ExternalRun) -> subprocess.Popen[str]:
    command = [*run.command(), "--nproc-per-node", "2"]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finished(run: ExternalRun) -> str:
    process = start(run)
    text, _ = process.communicate()
    assert process.returncode == 0, text[-3000:]
    return text


@pytest.mark.slow
def test_two_nodes_train_by_one_torchrun_each_and_the_export_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    run = plain_run(tmp_path, "plain", steps=4)
    task = {"image_uri": "image", "command": ["python"], "args": [*run.command()[1:], "--nproc-per-node", "1"]}
    machine = {"machine_type": "n1-standard-4"}
    pool: dict[str, Any] = {"machine_spec": machine, "container_spec": task, "replica_count": 1}
    spec = {"worker_pool_specs": [pool] * 2, "base_output_directory": {"output_uri_prefix": run.uri}}
    run_job("train", spec, labels={STEP_LABEL: "train"})
    logs = [Path(run.uri, f"logs/train/workerpool{node}-0.log").read_text(encoding="utf-8") for node in range(2)]
    assert all(f"--nnodes 2 --node-rank {node} --nproc-per-node 1" in log for node, log in enumerate(logs))
    assert "checkpoints on the disk of node 1" not in logs[1]
    summary = run.record("summary.json")
    assert (summary["steps"], summary["world_size"], summary["nodes"], summary["trainer"]) == (4, 2, 2, "plain")
    exported = sync_model(run.job)
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= exported["files"].keys()
    assert not [name for name in exported["files"] if name.endswith((".pt", ".bin"))]
    folder = Path(run.uri, "export")
    model = AutoModelForImageTextToText.from_pretrained(folder)
    assert len(AutoProcessor.from_pretrained(folder).tokenizer) == model.config.text_config.vocab_size
    assert sync_model(run.job)["reused"]


@pytest.mark.slow
@pytest.mark.parametrize("kills", [0, 3], ids=["stopped", "killed at random"])
def test_interrupted_and_resumed_it_ends_with_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kills: int
) -> None:
    monkeypatch.chdir(ROOT)
    straight = plain_run(tmp_path, "straight", steps=STEPS)
    finished(straight)
    run, draw = plain_run(tmp_path, "interrupted", steps=STEPS), random.Random(7)
    for _ in range(kills):
        process = start(run)
        wait_for_step(run, max(run.steps() if Path(run.uri, "metrics.jsonl").is_file() else [0]) + 1, process)
        time.sleep(draw.uniform(0, 0.7))
        lose_machine(process)
    if not kills:
        process = start(run)
        wait_for_step(run, 1, process)
        process.send_signal(signal.SIGTERM)
        text, _ = process.communicate()
        assert process.returncode == ExitCode.PREEMPTED, text[-3000:]
    assert "continuing after step" in finished(run)
    assert run.steps() == list(range(1, STEPS + 1))
    assert run.result() == straight.result()
