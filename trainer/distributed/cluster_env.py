"""The nodes of a job, from CLUSTER_SPEC (Vertex AI) or PET_* (Kubeflow), as seen by one node.

Vertex sets CLUSTER_SPEC on every replica of a CustomJob; TF_CONFIG only on jobs of several replicas. Kubeflow Trainer's
torch runtime sets PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR and PET_MASTER_PORT on every node of a TrainJob, and
PET_NPROC_PER_NODE, which the launcher's own --nproc-per-node outranks. RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT,
where set, count nodes and not processes, so they are never passed on to torchrun's workers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainer.errors import ConfigError

TRAINING_POOLS = ("workerpool0", "workerpool1")  # pool 2 holds reducers, pool 3 evaluators: neither trains
TF_ROLES = {"chief": 0, "master": 0, "worker": 1}
PET_VARIABLES = ("PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT")
NODE_LEVEL_VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK",
    "PET_NPROC_PER_NODE", *PET_VARIABLES,
)  # fmt: skip


@dataclass(frozen=True)
class Cluster:
    """The nodes of a job and which of them this one is. Reducers and evaluators are not nodes."""

    hosts: tuple[str, ...]  # "host:port" of each node, the chief first
    node_rank: int
    reducers: tuple[str, ...] = ()  # "host:port" of each
    in_pools: bool = True  # nodes are called after Vertex AI's worker pools; otherwise after their hosts

    @property
    def num_nodes(self) -> int:
        return len(self.hosts)

    @property
    def num_reducers(self) -> int:
        return len(self.reducers)

    @property
    def master_host(self) -> str:
        return self.hosts[0].rpartition(":")[0]

    @property
    def master_port(self) -> int:
        return int(self.hosts[0].rpartition(":")[2])


def read_cluster(environment: Mapping[str, str]) -> Cluster | None:
    """The cluster from CLUSTER_SPEC, else from PET_*, else from TF_CONFIG, else None (a single node).

    Raises ConfigError when a variable is set but not of the platform's form, or names a replica that must not train.
    """
    if text := environment.get("CLUSTER_SPEC"):
        return _from_cluster_spec(_parse("CLUSTER_SPEC", text))
    if any(environment.get(name) for name in PET_VARIABLES):
        return _from_pet(environment)
    if text := environment.get("TF_CONFIG"):
        return _from_tf_config(_parse("TF_CONFIG", text))
    return None


def _parse(variable: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{variable} is not JSON: {error.msg} at character {error.pos}",
            expected='{"cluster": {"workerpool0": ["host:port"], ...}, "task": {"type": "workerpool0", "index": 0}}',
        ) from error
    if not isinstance(value, dict) or not all(isinstance(value.get(part), dict) for part in ("cluster", "task")):
        raise ConfigError(
            f"{variable} has no cluster and task objects: {text[:200]}", expected="the form Vertex AI sets"
        )
    return value


def _from_cluster_spec(spec: dict[str, Any]) -> Cluster:
    cluster, task = spec["cluster"], spec["task"]
    pool, index = task.get("type"), task.get("index")
    if pool not in cluster:
        raise ConfigError(
            f"CLUSTER_SPEC task.type is {pool!r} but the cluster has {sorted(cluster)}",
            expected="one of the cluster's worker pools",
        )
    if pool not in TRAINING_POOLS:
        raise ConfigError(
            f"this replica is {pool}, which does not train",
            expected="the launcher in worker pools 0 and 1 only",
            fix="pool 2 runs the Reduction Server image without a command",
        )
    hosts = _hosts(cluster, "workerpool0") + _hosts(cluster, "workerpool1")
    if len(_hosts(cluster, "workerpool0")) != 1:
        raise ConfigError(
            f"worker pool 0 has {len(_hosts(cluster, 'workerpool0'))} replicas",
            expected="exactly 1, the chief; the others belong to worker pool 1",
        )
    node_rank = _index(index, len(_hosts(cluster, pool))) + (0 if pool == "workerpool0" else 1)
    return Cluster(tuple(hosts), node_rank, tuple(_hosts(cluster, "workerpool2")))


def _from_tf_config(spec: dict[str, Any]) -> Cluster:
    cluster, task = spec["cluster"], spec["task"]
    role = task.get("type")
    if role not in TF_ROLES:
        raise ConfigError(f"TF_CONFIG task.type is {role!r}", expected=f"one of {sorted(TF_ROLES)}")
    chiefs = _hosts(cluster, "chief") or _hosts(cluster, "master")
    workers = _hosts(cluster, "worker")
    rank = _index(task.get("index"), len(workers if role == "worker" else chiefs))
    reducers = tuple(_hosts(cluster, "ps"))
    return Cluster(tuple(chiefs + workers), rank + (len(chiefs) if role == "worker" else 0), reducers)


def _from_pet(environment: Mapping[str, str]) -> Cluster:
    """Only the chief's host is told. Kubeflow calls pods <job>-node-0-<rank>, so the others' names follow from it."""
    missing = [name for name in PET_VARIABLES if not environment.get(name)]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)} not set, but other PET_ variables are",
            expected=f"all of {', '.join(PET_VARIABLES)}, as Kubeflow Trainer's torch runtime sets them",
        )
    nodes = _pet_number(environment, "PET_NNODES", "a fixed number of nodes, 1 or more", least=1)
    rank = _pet_number(environment, "PET_NODE_RANK", f"a whole number from 0 to {nodes - 1}", most=nodes - 1)
    port = _pet_number(environment, "PET_MASTER_PORT", "a port from 1 to 65535", least=1, most=65535)
    name, dot, domain = environment["PET_MASTER_ADDR"].partition(".")
    job, dash, number = name.rpartition("-")
    others = [
        f"{job}{dash}{index}{dot}{domain}" if job and number == "0" else f"node {index}" for index in range(nodes)
    ]
    hosts = (environment["PET_MASTER_ADDR"], *others[1:])
    return Cluster(tuple(f"{host}:{port}" for host in hosts), rank, in_pools=False)


def _pet_number(
    environment: Mapping[str, str], name: str, expected: str, *, least: int = 0, most: int = 1 << 31
) -> int:
    text = environment[name]
    if not (text.isascii() and text.isdigit()) or not least <= int(text) <= most:
        raise ConfigError(f"{name} is {text!r}", expected=expected)
    return int(text)


def _hosts(cluster: dict[str, Any], pool: str) -> list[str]:
    hosts = cluster.get(pool) or []
    for host in hosts:
        name, _, port = str(host).rpartition(":")
        if not name or not port.isdigit():
            raise ConfigError(f"{pool} names {host!r}", expected="host:port")
    return list(hosts)


def _index(index: Any, count: int) -> int:
    if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < count:
        raise ConfigError(f"task.index is {index!r}", expected=f"a whole number from 0 to {count - 1}")
    return index
