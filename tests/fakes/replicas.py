"""Local jobs whose replicas are small scripts: each stands where a container's command would be.

A script finds its folder in `here`, its name (workerpool1-0) in `name`, and may append to files there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vlmpipe.platforms.local.jobs.job import run_job
from vlmpipe.trainer.errors import UserError

PRELUDE = """
import json, os, pathlib, signal, subprocess, sys
here = pathlib.Path(sys.argv[1])
me = json.loads(os.environ["CLUSTER_SPEC"])["task"]
name = f"{me['type']}-{me['index']}"
alive = open(here / "alive", "w")
"""


def pool(tmp_path: Path, script: str, replica_count: float = 1.0, **container: Any) -> dict[str, Any]:
    command = ["python", "-c", PRELUDE + script]
    return {
        "machine_spec": {"machine_type": "n1-standard-4"},
        "replica_count": replica_count,
        "container_spec": {"image_uri": "python:3.11", "command": command, "args": [str(tmp_path)], **container},
    }


def spec(tmp_path: Path, *pools: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {
        "worker_pool_specs": list(pools),
        "base_output_directory": {"output_uri_prefix": str(tmp_path / "run")},
        **fields,
    }


def record(tmp_path: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((tmp_path / "run/steps/train.json").read_text())
    return value


def run(job_spec: dict[str, Any]) -> str:
    return run_job("my-run-train", job_spec, labels={"vlmpipe-step": "train"})


def run_failing(job_spec: dict[str, Any]) -> UserError:
    with pytest.raises(UserError) as caught:
        run(job_spec)
    return caught.value
