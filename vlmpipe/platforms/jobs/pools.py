"""Readings of a job's message by pool: what replicas run, with how many processes, how long they may take to end."""

from __future__ import annotations

from google.cloud.aiplatform_v1.types import custom_job as api

from vlmpipe.job_spec.worker_pools import CHIEF_POOL, STOP_GRACE_VARIABLE, WORKER_POOL

NODE_POOLS = (CHIEF_POOL, WORKER_POOL)  # replicas that train


def task_of(spec: api.WorkerPoolSpec) -> api.ContainerSpec | api.PythonPackageSpec:
    """Specification of what a pool runs; both kinds have arguments and variables."""
    return spec.python_package_spec if spec.python_package_spec.python_module else spec.container_spec


def processes_of(spec: api.WorkerPoolSpec) -> int:
    """Processes that the launcher starts on one replica of this pool (its --nproc-per-node)."""
    args = list(task_of(spec).args)
    processes = args[args.index("--nproc-per-node") + 1] if "--nproc-per-node" in args[:-1] else "auto"
    return int(processes) if processes.isdigit() else max(1, spec.machine_spec.accelerator_count)


def stop_grace_s(job: api.CustomJobSpec, usual_s: float) -> float:
    """Seconds from the request to stop to a kill: the spec's, where that is more than usual."""
    seconds = {variable.name: variable.value for variable in task_of(job.worker_pool_specs[0]).env}.get(
        STOP_GRACE_VARIABLE, ""
    )
    return max(usual_s, float(seconds)) if seconds.isdigit() else usual_s
