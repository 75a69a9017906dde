"""A job whose spec buys GPUs, on this machine without any: the container's own command, as Vertex AI starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from tests.support.paths import ROOT
from tests.support.short_form import PATIENCE
from vlmpipe.config.run_config import load_run_file
from vlmpipe.job_spec.build import job_spec
from vlmpipe.trainer.config.job import RunPaths
from vlmpipe.trainer.errors import ExitCode
from vlmpipe.trainer.storage.records import read_record_file

L4 = ["cluster.machine_type=g2-standard-4", "cluster.accelerator_type=NVIDIA_L4", "cluster.accelerator_count=1"]
MAX_S = 20.0 * PATIENCE


def test_a_job_that_pays_for_a_gpu_and_has_none_ends_in_seconds_with_its_own_code(tmp_path: Path) -> None:
    config = load_run_file(ROOT / "configs/digits.yaml", L4)
    paths = RunPaths(run_id="r1", root_uri=str(tmp_path))
    run = Path(paths.run_uri)
    run.mkdir(parents=True)
    (run / "run.json").write_text(json.dumps(config.to_run_json(paths)))
    pool = job_spec(config, "train", str(run))["worker_pool_specs"][0]
    container = pool["container_spec"]
    assert pool["machine_spec"]["accelerator_count"] == 1
    cluster = {"cluster": {"workerpool0": ["localhost:2222"]}, "task": {"type": "workerpool0", "index": 0}}
    environment = {
        **os.environ,
        **{variable["name"]: variable["value"] for variable in container["env"]},
        "CLUSTER_SPEC": json.dumps(cluster | {"environment": "cloud"}),
        "CUDA_VISIBLE_DEVICES": "",  # none here, whatever this machine has
    }
    command = [sys.executable, *container["command"][1:], *container["args"]]
    began_s = time.monotonic()
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert time.monotonic() - began_s < MAX_S
    assert ended.returncode == ExitCode.MACHINE, ended.stderr
    assert "error: 1 x NVIDIA_L4 (g2-standard-4) is paid for, and torch sees none" in ended.stderr
    assert "expected: 1 GPU that torch sees" in ended.stderr and "to do:" in ended.stderr
    record = read_record_file(run / "steps/train.json")
    assert record["state"] == "failed" and record["detail"]["exit_code"] == ExitCode.MACHINE
    (node,) = read_record_file(run / "preflight.json")["nodes"]
    assert node["machine"]["gpus"]["gpus"] == [] and node["machine"]["bought"]["accelerator_type"] == "NVIDIA_L4"
