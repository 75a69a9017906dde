"""Custom jobs of the strict local Vertex AI that really run: their containers' commands, as processes here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from google.cloud.aiplatform_v1 import types as api

from tests.fakes.vertex.server import FakeVertex
from vlmpipe.rehearsal.vertex.custom_jobs import Step, state_of

TIMEOUT_S = 120


def run_jobs_for_real(vertex: FakeVertex, folder: Path) -> None:
    """Run a job of one replica, and end it as Vertex AI does, when somebody first asks for it. Logs go to `folder`."""
    jobs = vertex.custom_jobs

    def asked(name: str) -> api.CustomJob:
        job = jobs.known(name)
        if state_of(job) == "PENDING":
            code = _code_of(job, folder / f"{name.rpartition('/')[2]}.log")
            jobs.move(job, Step("RUNNING"))
            said = f"The replica workerpool0-0 exited with a non-zero status of {code}."
            jobs.move(job, Step("FAILED", 3, said) if code else Step("SUCCEEDED"))
        return job

    jobs.asked = asked  # type: ignore[method-assign]


def _code_of(job: api.CustomJob, log: Path) -> int:
    (pool,) = job.job_spec.worker_pool_specs
    container = pool.container_spec
    cluster = {"cluster": {"workerpool0": ["localhost:29577"]}, "task": {"type": "workerpool0", "index": 0}}
    environment = {
        **os.environ,
        **{variable.name: variable.value for variable in container.env},
        "CLUSTER_SPEC": json.dumps(cluster),
        "CUDA_VISIBLE_DEVICES": "",  # none here, whatever this machine has
        "OMP_NUM_THREADS": "1",
    }
    assert container.command[0] == "python"
    command = [sys.executable, *container.command[1:], *container.args]
    with log.open("w", encoding="utf-8") as output:
        limit_s = min(TIMEOUT_S, job.job_spec.scheduling.timeout.total_seconds())
        return subprocess.run(command, env=environment, stdout=output, stderr=output, timeout=limit_s).returncode
