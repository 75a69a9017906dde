"""Reads a job's nodes from CLUSTER_SPEC (Vertex AI) or PET_* (Kubeflow).

Vertex sets CLUSTER_SPEC on every replica of a CustomJob; TF_CONFIG only on jobs of several replicas. Kubeflow Trainer's
torch runtime sets PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR and PET_MASTER_PORT on every node of a TrainJob, and
PET_NPROC_PER_NODE, which the launcher's --nproc-per-node overrides. RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT count
nodes, not processes, so they are never passed on to torchrun's workers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from vlmpipe.trainer.errors import ConfigError

REPORT_VARIABLE = "VLMPIPE_PREFLIGHT"  # a node's preflight report, from the launcher to its ranks
LAUNCHED_VARIABLE = "VLMPIPE_LAUNCHED_S"  # when the launcher began, by this machine's time.monotonic()
PREFLIGHT_FILE = "preflight.json"  # reports of all nodes, in the run's folder
TRAINING_POOLS = ("workerpool0", "workerpool1")  # pool 2 holds reducers, pool 3 evaluators: neither trains
ROLES = ("chief", "worker", "ps", "evaluator")  # by worker pool
TF_ROLES = {"chief": 0, "master": 0, "worker": 1}
PET_VARIABLES = ("PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT")
NODE_LEVEL_VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK",
    "PET_NPROC_PER_NODE", *PET_VARIABLES,
)  # fmt: skip


@dataclass(frozen=True)
class Cluster:
    """A job's nodes, and which one this is. Reducers and evaluators are not nodes."""

    hosts: tuple[str, ...]  # "host:port" of each node, the chief first
    node_rank: int
    reducers: tuple[str, ...] = ()  # "host:port" of each
    in_pools: bool = True  # nodes are named after Vertex AI's worker pools, otherwise after their hosts

    @property
    def num_nodes(self) -> int:
        return len(self.hosts)

    @property
    def nodes_here(self) -> int:
        """Nodes with this one's host: more than one where this machine stands in for a cluster."""
        names = [host.rpartition(":")[0] for host in self.hosts]
        return names.count(names[self.node_rank])

    @property
    def num_reducers(self) -> int:
        return len(self.reducers)

    @property
    def master_host(self) -> str:
        return self.hosts[0].rpartition(":")[0]

    @property
    def master_port(self) -> int:
        return int(self.hosts[0].rpartition(":")[2])


@dataclass(frozen=True)
class Roles:
    """All replicas of a job by role, and which one this is. `hosts` has "host:port" of each."""

    hosts: Mapping[str, tuple[str, ...]]  # chief, worker, ps, evaluator
    role: str
    index: int

    @property
    def rank(self) -> int:
        """Place among all replicas, in the order of roles."""
        before = ROLES[: ROLES.index(self.role)]
        return sum(len(self.hosts[role]) for role in before) + self.index

    @property
    def world_size(self) -> int:
        return sum(map(len, self.hosts.values()))

    @property
    def is_node(self) -> bool:
        """Return whether this replica trains: the chief or a worker."""
        return self.role in ROLES[:2]

    def cluster(self) -> Cluster:
        """The nodes that train; of another replica's view it has the chief's rank, which it must not use."""
        nodes = (*self.hosts["chief"], *self.hosts["worker"])
        return Cluster(nodes, self.rank if self.is_node else 0)

    def tf_config(self) -> str:
        """TF_CONFIG. An evaluator is named by its task only: it is no part of TensorFlow's cluster."""
        cluster = {role: list(hosts) for role, hosts in self.hosts.items() if hosts and role != "evaluator"}
        return json.dumps({"cluster": cluster, "task": {"type": self.role, "index": self.index}})


def read_roles(environment: Mapping[str, str]) -> Roles | None:
    """Roles by worker pool, from CLUSTER_SPEC; None for a job of one replica. Raises ConfigError elsewhere."""
    if text := environment.get("CLUSTER_SPEC"):
        spec = _parse("CLUSTER_SPEC", text)
        hosts = {role: tuple(_hosts(spec.cluster, f"workerpool{pool}")) for pool, role in enumerate(ROLES)}
        pool = str(spec.task.get("type", ""))
        if pool not in (f"workerpool{number}" for number in range(len(ROLES))) or not hosts["chief"]:
            raise ConfigError(f"CLUSTER_SPEC task.type is {pool!r}", expected="one of the cluster's worker pools")
        role = ROLES[int(pool[-1])]
        roles = Roles(hosts, role, _index(spec.task.get("index"), len(hosts[role])))
        if text := environment.get("TF_CONFIG"):
            _require_same_roles(roles, _parse("TF_CONFIG", text))
        return roles
    if any(environment.get(name) for name in PET_VARIABLES):
        raise ConfigError("a TrainJob's nodes have no roles", expected="Vertex AI, or this machine, for roles")
    return None


def _require_same_roles(roles: Roles, tf_config: _Variable) -> None:
    """Raise ConfigError where TF_CONFIG gives this replica another place, or roles other numbers of replicas."""
    cluster, task = tf_config.cluster, tf_config.task
    named = {"chief" if role == "master" else role: len(_listed(cluster, role)) for role in cluster}
    named.pop("evaluator", None)  # no part of TensorFlow's cluster, but some name it
    known = {role: len(hosts) for role, hosts in roles.hosts.items() if hosts and role != "evaluator"}
    place = ("chief" if task.get("type") == "master" else task.get("type"), str(task.get("index")))
    if named != known or place != (roles.role, str(roles.index)):
        raise ConfigError(
            f"TF_CONFIG has {place[0]} {place[1]} of {named}, but CLUSTER_SPEC {roles.role} {roles.index} of {known}",
            expected="the same replicas in both",
            fix="set neither of them in cluster.env: the platform does",
        )


def read_cluster(environment: Mapping[str, str]) -> Cluster | None:
    """The cluster from CLUSTER_SPEC, else PET_*, else TF_CONFIG, else None (a single node).

    Raises ConfigError for a variable that the platform would not set so, or on a replica that must not train.
    """
    if text := environment.get("CLUSTER_SPEC"):
        return _from_cluster_spec(_parse("CLUSTER_SPEC", text))
    if any(environment.get(name) for name in PET_VARIABLES):
        return _from_pet(environment)
    if text := environment.get("TF_CONFIG"):
        return _from_tf_config(_parse("TF_CONFIG", text))
    return None


@dataclass(frozen=True)
class _Variable:
    """The cluster by pool or role, and this replica's task, as a variable says them."""

    cluster: Mapping[str, object]
    task: Mapping[str, object]


def _parse(variable: str, text: str) -> _Variable:
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
    return _Variable(value["cluster"], value["task"])


def _from_cluster_spec(spec: _Variable) -> Cluster:
    cluster, task = spec.cluster, spec.task
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
    chiefs, workers = _hosts(cluster, "workerpool0"), _hosts(cluster, "workerpool1")
    if len(chiefs) != 1:
        raise ConfigError(
            f"worker pool 0 has {len(chiefs)} replicas",
            expected="exactly 1, the chief; the others belong to worker pool 1",
        )
    is_chief = pool == "workerpool0"
    node_rank = _index(index, len(chiefs if is_chief else workers)) + (0 if is_chief else 1)
    return Cluster((*chiefs, *workers), node_rank, tuple(_hosts(cluster, "workerpool2")))


def _from_tf_config(spec: _Variable) -> Cluster:
    cluster, task = spec.cluster, spec.task
    role = task.get("type")
    if role not in TF_ROLES:
        raise ConfigError(f"TF_CONFIG task.type is {role!r}", expected=f"one of {sorted(TF_ROLES)}")
    chiefs = _hosts(cluster, "chief") or _hosts(cluster, "master")
    workers = _hosts(cluster, "worker")
    rank = _index(task.get("index"), len(workers if role == "worker" else chiefs))
    reducers = tuple(_hosts(cluster, "ps"))
    return Cluster(tuple(chiefs + workers), rank + (len(chiefs) if role == "worker" else 0), reducers)


def _from_pet(environment: Mapping[str, str]) -> Cluster:
    """The variables name the chief's host only. Pods are called <job>-node-0-<rank>, which gives the others' names."""
    missing = [name for name in PET_VARIABLES if not environment.get(name)]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)} not set, but other PET_ variables are",
            expected=f"all of {', '.join(PET_VARIABLES)}, as Kubeflow Trainer's torch runtime sets them",
        )

    def number(name: str, expected: str, allowed: range) -> int:
        text = environment[name]
        if not (text.isascii() and text.isdigit()) or int(text) not in allowed:
            raise ConfigError(f"{name} is {text!r}", expected=expected)
        return int(text)

    nodes = number("PET_NNODES", "a fixed number of nodes, 1 or more", range(1, 1 << 31))
    rank = number("PET_NODE_RANK", f"a whole number from 0 to {nodes - 1}", range(nodes))
    port = number("PET_MASTER_PORT", "a port from 1 to 65535", range(1, 65536))
    chief = environment["PET_MASTER_ADDR"]
    match = re.fullmatch(r"([^.]+-)0(\..*|)", chief)
    others = [f"{match[1]}{node}{match[2]}" if match else f"node {node}" for node in range(1, nodes)]
    return Cluster(tuple(f"{host}:{port}" for host in (chief, *others)), rank, in_pools=False)


def _listed(cluster: Mapping[str, object], pool: str) -> list[str]:
    hosts = cluster.get(pool) or []
    if not isinstance(hosts, list):
        raise ConfigError(f"{pool} is {hosts!r}", expected="a list of host:port")
    return hosts


def _hosts(cluster: Mapping[str, object], pool: str) -> list[str]:
    hosts = _listed(cluster, pool)
    for host in hosts:
        name, _, port = str(host).rpartition(":")
        if not name or not port.isdigit():
            raise ConfigError(f"{pool} names {host!r}", expected="host:port")
    return list(hosts)


def _index(index: object, count: int) -> int:
    if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < count:
        raise ConfigError(f"task.index is {index!r}", expected=f"a whole number from 0 to {count - 1}")
    return index
