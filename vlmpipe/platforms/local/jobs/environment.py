"""Environment variables that Vertex AI sets for each replica of a CustomJob, for replicas on this machine.

Documented ones (CLUSTER_SPEC, TF_CONFIG, AIP_*, CLOUD_ML_*) have the documented form. RANK, WORLD_SIZE, MASTER_ADDR and
MASTER_PORT are not documented, but Google's samples find them in custom containers, where they count nodes and not
processes; code that mistakes them for ranks must fail here, not on 32 GPUs.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from google.cloud.aiplatform_v1.types import custom_job as api
from google.protobuf import json_format

from vlmpipe.job_spec.worker_pools import (
    CHIEF_POOL,
    REDUCTION_SERVER_IMAGE,
)
from vlmpipe.platforms.jobs.inherited_environment import inherited_environment
from vlmpipe.platforms.jobs.pools import NODE_POOLS, processes_of, task_of
from vlmpipe.trainer.preflight.bought import VARIABLE as BOUGHT_VARIABLE
from vlmpipe.trainer.storage.base import join_uri

HOST = "localhost"
TF_ROLES = ("chief", "worker", "ps", "evaluator")  # by pool


@dataclass(frozen=True)
class Replica:
    """One container of a job."""

    pool: int
    index: int
    spec: api.WorkerPoolSpec

    @property
    def name(self) -> str:
        return f"workerpool{self.pool}-{self.index}"

    @property
    def is_chief(self) -> bool:
        return self.pool == CHIEF_POOL


def replicas(job: api.CustomJobSpec) -> list[Replica]:
    """Every replica of the job in the order of pools, also those that do not run on this machine."""
    return [
        Replica(pool, index, spec)
        for pool, spec in enumerate(job.worker_pool_specs)
        for index in range(spec.replica_count)
    ]


def take_addresses(job: api.CustomJobSpec) -> dict[str, str]:
    """`localhost:port` for each replica, by its name, with free ports.

    A port that is free when looked up can be lost before the replica binds it; all are looked up at once, so that at
    least two replicas never get the same.
    """
    addresses = {}
    with contextlib.ExitStack() as held:
        for replica in replicas(job):
            probe = held.enter_context(socket.socket())
            probe.bind((HOST, 0))
            addresses[replica.name] = f"{HOST}:{probe.getsockname()[1]}"
    return addresses


def replica_environment(
    job: api.CustomJobSpec, replica: Replica, addresses: Mapping[str, str], *, job_id: str, project: str
) -> dict[str, str]:
    """The whole environment of a replica: this process's, then the spec's, then what Vertex AI sets."""
    inherited = inherited_environment()
    variables = {variable.name: variable.value for variable in task_of(replica.spec).env}
    variables.pop(BOUGHT_VARIABLE, None)  # this machine stands in for the one that the spec buys
    inherited.setdefault("OMP_NUM_THREADS", str(_threads(job)))
    return {
        **inherited,
        **variables,
        **_cluster(job, replica, addresses),
        **_directories(job.base_output_directory.output_uri_prefix),
        "CLOUD_ML_PROJECT_ID": project or "local",
        "CLOUD_ML_JOB_ID": job_id,
    }


def is_started(replica: Replica) -> bool:
    """Return whether the container runs on this machine: a Reduction Server needs the GPU nodes' network."""
    return REDUCTION_SERVER_IMAGE not in replica.spec.container_spec.image_uri


def _threads(job: api.CustomJobSpec) -> int:
    """Threads for each process, so that all processes together use each core once."""
    processes = sum(processes_of(replica.spec) for replica in replicas(job) if is_started(replica))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // processes)


def _cluster(job: api.CustomJobSpec, replica: Replica, addresses: Mapping[str, str]) -> dict[str, str]:
    pools: dict[str, list[str]] = {}
    for other in replicas(job):
        pools.setdefault(f"workerpool{other.pool}", []).append(addresses[other.name])
    task = {"type": f"workerpool{replica.pool}", "index": replica.index, "trial": ""}
    cluster_spec = {
        "cluster": pools,
        "environment": "cloud",
        "task": task,
        "job": json_format.MessageToDict(api.CustomJobSpec.pb(job), preserving_proto_field_name=True),
    }
    nodes = [address for pool in NODE_POOLS for address in pools.get(f"workerpool{pool}", [])]
    host, _, port = nodes[0].rpartition(":")
    variables = {"CLUSTER_SPEC": json.dumps(cluster_spec), "MASTER_ADDR": host, "MASTER_PORT": port}
    if replica.pool in NODE_POOLS:
        variables |= {"RANK": str(nodes.index(addresses[replica.name])), "WORLD_SIZE": str(len(nodes))}
    if len(nodes) > 1:  # documented as absent from jobs of one replica
        variables["TF_CONFIG"] = json.dumps(_tf_config(pools, replica))
    return variables


def _tf_config(pools: Mapping[str, list[str]], replica: Replica) -> dict[str, object]:
    """An evaluator is named by its task only, and is no part of the cluster."""
    named = enumerate(TF_ROLES[:-1])
    roles = {role: pools[f"workerpool{pool}"] for pool, role in named if f"workerpool{pool}" in pools}
    return {"cluster": roles, "environment": "cloud", "task": {"type": TF_ROLES[replica.pool], "index": replica.index}}


def _directories(base_uri: str) -> dict[str, str]:
    names = {"AIP_MODEL_DIR": "model", "AIP_CHECKPOINT_DIR": "checkpoints", "AIP_TENSORBOARD_LOG_DIR": "logs"}
    return {variable: join_uri(base_uri, name) + "/" for variable, name in names.items()}
