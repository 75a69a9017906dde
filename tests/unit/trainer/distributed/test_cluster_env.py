"""CLUSTER_SPEC and TF_CONFIG as Vertex sets them, PET_* as Kubeflow does, and as they must not be."""

from __future__ import annotations

import json
from typing import Any

import pytest

from vlmpipe.trainer.distributed.cluster_env import Cluster, read_cluster, read_roles
from vlmpipe.trainer.distributed.rendezvous import node_name
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.launch import torchrun_arguments

POOLS = {
    "workerpool0": ["cmle-training-workerpool0-ab-0:2222"],
    "workerpool1": ["cmle-training-workerpool1-ab-0:2222", "cmle-training-workerpool1-ab-1:2222"],
    "workerpool2": [f"cmle-training-workerpool2-ab-{number}:2222" for number in range(4)],
}


def spec(pool: str, index: Any, pools: dict[str, list[str]] = POOLS) -> dict[str, str]:
    content = {"cluster": pools, "environment": "cloud", "task": {"type": pool, "index": index}}
    return {"CLUSTER_SPEC": json.dumps(content)}


@pytest.mark.parametrize(
    ("pool", "index", "node_rank"), [("workerpool0", 0, 0), ("workerpool1", 0, 1), ("workerpool1", 1, 2)]
)
def test_nodes_are_the_chief_then_the_workers_and_reducers_do_not_count(pool: str, index: int, node_rank: int) -> None:
    cluster = read_cluster(spec(pool, index))
    assert cluster is not None
    assert (cluster.node_rank, cluster.num_nodes, cluster.num_reducers) == (node_rank, 3, 4)
    assert (cluster.master_host, cluster.master_port) == ("cmle-training-workerpool0-ab-0", 2222)


def test_cluster_spec_wins_over_tf_config() -> None:
    tf_config = {"cluster": {"chief": ["other:1"]}, "task": {"type": "chief", "index": 0}}
    cluster = read_cluster({**spec("workerpool1", 1), "TF_CONFIG": json.dumps(tf_config)})
    assert cluster is not None and cluster.node_rank == 2


@pytest.mark.parametrize(("role", "index", "node_rank"), [("chief", 0, 0), ("worker", 0, 1), ("worker", 1, 2)])
def test_tf_config_is_a_fallback(role: str, index: int, node_rank: int) -> None:
    content = {
        "cluster": {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"]},
        "task": {"type": role, "index": index},
    }
    cluster = read_cluster({"TF_CONFIG": json.dumps(content)})
    assert cluster == Cluster(("a:1", "b:1", "c:1"), node_rank, reducers=("d:1",))


PET = {
    "PET_NNODES": "3",
    "PET_NPROC_PER_NODE": "auto",
    "PET_NODE_RANK": "2",
    "PET_MASTER_ADDR": "digits-train-1a-node-0-0.digits-train-1a",
    "PET_MASTER_PORT": "29500",
}


def test_kubeflows_variables_name_the_chief_and_count_the_nodes() -> None:
    cluster = read_cluster(PET)
    assert cluster is not None
    assert (cluster.node_rank, cluster.num_nodes, cluster.num_reducers) == (2, 3, 0)
    assert (cluster.master_host, cluster.master_port) == (PET["PET_MASTER_ADDR"], 29500)
    assert node_name(cluster, 1) == "digits-train-1a-node-0-1.digits-train-1a", "who does not come is called by its pod"


def test_unknown_chief_name_leaves_other_nodes_unnamed() -> None:
    cluster = read_cluster({**PET, "PET_MASTER_ADDR": "localhost"})
    assert cluster is not None and [node_name(cluster, node) for node in range(3)] == ["localhost", "node 1", "node 2"]


def test_cluster_spec_wins_over_kubeflows_variables_and_those_over_tf_config() -> None:
    tf_config = {"TF_CONFIG": json.dumps({"cluster": {"chief": ["other:1"]}, "task": {"type": "chief", "index": 0}})}
    assert read_cluster({**PET, **tf_config}) == read_cluster(PET)
    assert read_cluster({**PET, **spec("workerpool0", 0)}) == read_cluster(spec("workerpool0", 0))


def test_no_variables_mean_no_cluster() -> None:
    assert read_cluster({"RANK": "3", "WORLD_SIZE": "8"}) is None


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"CLUSTER_SPEC": "{"}, "not JSON"),
        ({"CLUSTER_SPEC": "[]"}, "no cluster and task"),
        ({"CLUSTER_SPEC": '{"cluster": {"worker": ["10.0.0.2:2222"]}}'}, "no cluster and task"),
        (spec("worker", 0), "task.type is 'worker'"),
        (spec("workerpool2", 0), "does not train"),
        (spec("workerpool1", 2), "from 0 to 1"),
        (spec("workerpool1", "0"), "task.index is '0'"),
        (spec("workerpool0", 0, {"workerpool0": ["a:1", "b:1"]}), "2 replicas"),
        (spec("workerpool0", 0, {"workerpool0": ["a"]}), "expected: host:port"),
        ({**PET, "PET_NNODES": "1:4"}, "PET_NNODES is '1:4'"),
        ({**PET, "PET_NODE_RANK": "3"}, "from 0 to 2"),
        ({**PET, "PET_MASTER_PORT": "70000"}, "a port from 1"),
        ({"PET_NNODES": "2"}, "PET_NODE_RANK, PET_MASTER_ADDR, PET_MASTER_PORT not set"),
        ({"TF_CONFIG": '{"cluster": {}, "task": {"type": "evaluator"}}'}, "task.type is 'evaluator'"),
    ],
)
def test_malformed_spec_is_reported(environment: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace("(", r"\(")):
        read_cluster(environment)


def test_torchrun_counts_nodes_and_processes_apart() -> None:
    arguments = torchrun_arguments(
        Cluster(("chief:2222", "worker:2222"), node_rank=1), 8, "vlmpipe.trainer.train", ["--config", "x"]
    )
    options = dict(zip(arguments[:-4:2], arguments[1:-4:2], strict=True))
    assert options["--nnodes"] == "2" and options["--node-rank"] == "1" and options["--nproc-per-node"] == "8"
    assert options["--master-addr"] == "chief" and options["--master-port"] == "2222"
    assert arguments[-4:] == ["-m", "vlmpipe.trainer.train", "--config", "x"]


@pytest.mark.parametrize(
    "tf_config",
    [
        {"cluster": {"chief": ["a:1"], "worker": ["b:1"]}, "task": {"type": "worker", "index": 0}},
        {"cluster": {"chief": ["a:1"], "worker": ["b:1"], "ps": ["c:1"]}, "task": {"type": "chief", "index": 0}},
    ],
    ids=["no-ps", "other-task"],
)
def test_tf_config_that_contradicts_cluster_spec_is_refused(tf_config: dict[str, Any]) -> None:
    pools = {"workerpool0": ["a:1"], "workerpool1": ["b:1"], "workerpool2": ["c:1"]}
    variables = {"CLUSTER_SPEC": json.dumps({"cluster": pools, "task": {"type": "workerpool1", "index": 0}})}
    roles = read_roles(variables)
    assert roles
    assert read_roles({**variables, "TF_CONFIG": roles.tf_config()}) == roles
    with pytest.raises(ConfigError, match=r"TF_CONFIG has .* but CLUSTER_SPEC worker 0"):
        read_roles({**variables, "TF_CONFIG": json.dumps(tf_config)})
