"""The worker pools of a job in a plan's form."""

from __future__ import annotations

from vlmpipe.catalog.this_machine import NAME as THIS_MACHINE
from vlmpipe.config.run_config import RunConfig
from vlmpipe.job_spec.build import Job
from vlmpipe.job_spec.forms import WorkerPool
from vlmpipe.job_spec.worker_pools import is_reducers
from vlmpipe.records.plan_json import PoolJson

ROLES = ("chief", "workers", "Reduction Server", "evaluators")


def pool_json(number: int, pool: WorkerPool) -> PoolJson:
    machine, disk, container = pool["machine_spec"], pool.get("disk_spec"), pool.get("container_spec")
    args = container.get("args", []) if container else []
    return {
        "role": f"{number} {'parameter servers' if number == 2 and not is_reducers(pool) else ROLES[number]}",
        "replica_count": pool["replica_count"],
        "machine_type": machine["machine_type"],
        "accelerator_type": machine.get("accelerator_type", ""),
        "accelerator_count": machine.get("accelerator_count", 0),
        "boot_disk_type": disk["boot_disk_type"] if disk else "",
        "boot_disk_size_gb": disk["boot_disk_size_gb"] if disk else 0,
        "image_uri": container["image_uri"] if container else pool["python_package_spec"]["executor_image_uri"],
        "runs": args[args.index("--") + 1] if "--" in args else "",
    }


def launchers_json(config: RunConfig, job: Job) -> PoolJson:
    """A job's launchers on this machine, in the form of a worker pool."""
    cluster = config.cluster.of_job(job)
    return {
        "role": "launchers",
        "replica_count": cluster.replica_count,
        "processes_per_replica": cluster.processes,
        "machine_type": THIS_MACHINE,
        "accelerator_type": "",
        "accelerator_count": 0,
        "boot_disk_type": "",
        "boot_disk_size_gb": 0,
        "image_uri": "",
        "runs": "",
    }
