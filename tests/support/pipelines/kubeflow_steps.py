"""A job step on Kubeflow for tests: its run's folder, its inputs, and the step as a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.paths import ROOT
from tests.support.pipelines.example_project import load_for_vertex
from vlmpipe.trainer.config.job import RunPaths

IMAGE = "registry.example.com/vlmpipe/trainer:1"


def run_folder(root: Path, section: dict[str, Any] | None = None) -> Path:
    """A run's folder with what the step reads of it."""
    (root / "steps").mkdir(parents=True, exist_ok=True)
    if not (root / "run.json").exists():
        config = load_for_vertex(ROOT / "configs/digits.yaml", [f"kubeflow={json.dumps(section or {})}"])
        paths = RunPaths(run_id=root.name, root_uri=str(root.parent))
        (root / "run.json").write_text(json.dumps(config.to_run_json(paths)))
    (root / "steps/resolve-run.json").write_text(json.dumps({"step": "resolve-run", "started_s": 1.5}))
    return root


def inputs(run: Path, *, nodes: int = 1, processes: str = "1", reducers: int = 0) -> dict[str, Any]:
    """The inputs of the train step for a job of that many nodes, with the forms that KFP hands on."""
    args = ["--nproc-per-node", processes, "--", "vlmpipe.trainer.train", "--config", f"{run}/run.json"]
    container = {"image_uri": IMAGE, "command": ["python", "-m", "vlmpipe.trainer.launch"], "args": args}
    node = {"machine_spec": {"machine_type": "n1-standard-8"}, "container_spec": container}
    pools = [{**node, "replica_count": 1.0}, *([{**node, "replica_count": nodes - 1.0}] if nodes > 1 else [])]
    if reducers:
        image = {"image_uri": "us-docker.pkg.dev/vertex-ai-restricted/training/reductionserver:latest"}
        machine = {"machine_type": "n1-highcpu-16"}
        pools.append({"machine_spec": machine, "replica_count": float(reducers), "container_spec": image})
    return {
        "display_name": "tiny-train",
        "worker_pool_specs": pools,
        "timeout": "3600s",
        "base_output_directory": str(run),
        "labels": {"vlmpipe-step": "train"},
    }


def step_record(run: Path) -> dict[str, Any]:
    return dict(json.loads((run / "steps/train.json").read_text()))


def start_step(given: dict[str, Any]) -> subprocess.Popen[str]:
    """The step in a process of its own, as KFP runs it."""
    load = "import json, sys; from vlmpipe.platforms.job_step import run_custom_job"
    body = f"{load}; run_custom_job('kubeflow', **json.loads(sys.argv[1]))"
    return subprocess.Popen(
        [sys.executable, "-c", body, json.dumps(given)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
