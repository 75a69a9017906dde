"""Runs a CustomJob on this machine: its replicas as processes, with the endings of a job on Vertex AI.

The chief's exit decides: when it leaves with 0, the job is done and the others are shut down. Any replica that leaves
with another code before that fails the job, unless the run asks for restarts (see
vlmpipe/platforms/local/jobs/restart_policy.py). A Reduction Server is named to the others in CLUSTER_SPEC but not
started: it needs the GPU nodes' network. Parameter servers (pool 2) and evaluators (pool 3) are.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from google.cloud.aiplatform_v1.types import custom_job as api

from vlmpipe.job_spec.forms import CustomJobSpec
from vlmpipe.job_spec.parse import parse_job_spec
from vlmpipe.job_spec.worker_pools import STEP_LABEL
from vlmpipe.platforms.jobs.job_failure import failure
from vlmpipe.platforms.jobs.pools import processes_of, stop_grace_s
from vlmpipe.platforms.jobs.step_record import recorded_job
from vlmpipe.platforms.local.jobs.environment import (
    is_started,
    replica_environment,
    replicas,
    take_addresses,
)
from vlmpipe.platforms.local.jobs.fault_injector import FaultInjector, FaultLog
from vlmpipe.platforms.local.jobs.fault_spec import parse_faults
from vlmpipe.platforms.local.jobs.package_environment import package_python
from vlmpipe.platforms.local.jobs.replica import Process
from vlmpipe.platforms.local.jobs.restart_history import RestartHistory, steps_done
from vlmpipe.platforms.local.jobs.restart_policy import FAULTS_VARIABLE, restart_policy
from vlmpipe.platforms.local.jobs.supervisor import STOP_GRACE_S, Supervisor
from vlmpipe.trainer.config.job import secrets_of
from vlmpipe.trainer.errors import ConfigError, os_errors
from vlmpipe.trainer.secret_manager import use_secrets
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.local import LocalStorage
from vlmpipe.trainer.storage.records import RUN_FILE

TRAIN_STEP = "train"  # the job into which faults are injected


def run_job(
    display_name: str,
    job_spec: CustomJobSpec,
    *,
    labels: Mapping[str, str] | None = None,
    project: str = "",
) -> str:
    """Run the job and return its `gcp_resources`, a JSON text that names its logs.

    `job_spec` has the fields of the API's CustomJobSpec. Must be called from the main thread: it takes over SIGINT and
    SIGTERM for as long as the job runs. Raises ConfigError for a spec that Vertex AI would refuse, and UserError with
    the failing replica's exit code when the job fails or is stopped, which the step's record has as well.
    """
    step = (labels or {}).get(STEP_LABEL) or re.sub(r"[^A-Za-z0-9_-]+", "-", display_name).strip("-") or "job"
    base_uri = job_spec["base_output_directory"]["output_uri_prefix"]
    store = open_storage(base_uri) if base_uri else None
    if not isinstance(store, LocalStorage):
        raise ConfigError(f"base_output_directory is {base_uri!r}", expected="a folder of this machine for a local job")
    with recorded_job(store, step) as record:
        record.open()
        job = parse_job_spec(job_spec)
        if store.stat(RUN_FILE):  # before the replicas do, so that their logs, which pass through here, hide them
            use_secrets(secrets_of(store))
        log_folder = store.path(f"logs/{step}")
        with os_errors(f"creating {log_folder}"):
            log_folder.mkdir(parents=True, exist_ok=True)
        processes = _processes(job, log_folder, project)
        faults = os.environ.get(FAULTS_VARIABLE, "") if step == TRAIN_STEP else ""
        log = FaultLog(store.root) if faults else None
        history = RestartHistory(store, step, processes[0].name, log)
        injector = _injected_faults(faults, job, processes, store, log) if log else None
        with injector or contextlib.nullcontext():
            verdict = Supervisor(
                processes,
                timeout_s=job.scheduling.timeout.total_seconds(),
                stop_grace_s=stop_grace_s(job, STOP_GRACE_S),
                policy=restart_policy(job.scheduling),
                restarting=history.add,
                stopping=injector.stop if injector else lambda: None,
            ).run()
        log_path = str(log_folder / f"{verdict.replica}.log")
        record.detail.update(replica=verdict.replica, log=log_path)
        if history.restarts:
            record.detail["restarts"] = [restart.text() for restart in history.restarts]
        if verdict.code:
            restarts = len(history.restarts)
            raise failure(verdict.code, verdict.replica, verdict.reason, log=log_path, restarts=restarts)
    return json.dumps({"resources": [{"resourceType": "LocalJob", "resourceUri": str(log_folder)}]})


def _injected_faults(
    texts: str, job: api.CustomJobSpec, processes: list[Process], store: LocalStorage, log: FaultLog
) -> FaultInjector:
    ranks = processes_of(job.worker_pool_specs[0])
    return FaultInjector(
        parse_faults([texts], nodes=len(processes), ranks_per_node=ranks),
        processes,
        ranks_per_node=ranks,
        steps_done=lambda since_s: steps_done(store, TRAIN_STEP, since_s),
        log=log,
    )


def _processes(job: api.CustomJobSpec, log_folder: Path, project: str) -> list[Process]:
    """A process for each replica that this machine can run, the chief first. Prints which replicas are left out."""
    addresses, job_id = take_addresses(job), str(time.time_ns())
    processes = []
    python_of = functools.cache(lambda uris: package_python(uris, log_folder / "pip.log"))  # not again for each replica
    for replica in replicas(job):
        if not is_started(replica):
            print(f"[{replica.name}] Reduction Server: named in CLUSTER_SPEC, not started on this machine", flush=True)
            continue
        log = log_folder / f"{replica.name}.log"
        command = _command(replica.spec, python_of)
        environment = replica_environment(job, replica, addresses, job_id=job_id, project=project)
        processes.append(Process(replica.name, command, environment, log, is_chief=replica.is_chief))
    return processes


def _command(spec: api.WorkerPoolSpec, python_of: Callable[[tuple[str, ...]], str]) -> list[str]:
    """Command of a replica: its container's command, or its package's module in an environment of its own."""
    package = spec.python_package_spec
    if package.python_module:
        return [python_of(tuple(package.package_uris)), "-m", package.python_module, *package.args]
    container = spec.container_spec
    return [sys.executable if word == "python" else word for word in container.command] + list(container.args)
