"""recipes/tensorflow: the worker pools of its jobs on Vertex AI, and the TF_CONFIG that each replica gets."""

from __future__ import annotations

import json

import pytest

from tests.support.paths import ROOT
from vlmpipe.config.run_config import load_run_file
from vlmpipe.job_spec.build import worker_pools
from vlmpipe.job_spec.check import job_violations
from vlmpipe.job_spec.parse import parse_job_spec
from vlmpipe.trainer.distributed.cluster_env import ROLES, read_roles

POOLS = {"mirrored": [1], "multiworker": [1, 1], "parameter-server": [1, 2, 1]}


@pytest.mark.parametrize(("name", "counts"), POOLS.items())
def test_each_run_file_has_the_pools_of_its_strategy(name: str, counts: list[int]) -> None:
    image = "cluster.image_uri=us-docker.pkg.dev/p/v/t@sha256:" + 64 * "0"
    account = "gcp={service_account: trainer@example-project.iam.gserviceaccount.com}"
    config = load_run_file(ROOT / f"recipes/tensorflow/{name}.yaml", [image, account])
    pools = worker_pools(config, "train", "gs://b/run")
    assert [pool["replica_count"] for pool in pools] == counts
    assert parse_job_spec({"worker_pool_specs": pools})
    assert job_violations(config, "train", "gs://b/run") == []
    cluster = {f"workerpool{pool}": [f"{pool}-{n}:2222" for n in range(count)] for pool, count in enumerate(counts)}
    for pool, count in enumerate(counts):
        task = {"type": f"workerpool{pool}", "index": count - 1}
        roles = read_roles({"CLUSTER_SPEC": json.dumps({"cluster": cluster, "task": task})})
        assert roles
        told = json.loads(roles.tf_config())
        assert told["task"] == {"type": ROLES[pool], "index": count - 1}
        assert list(map(len, told["cluster"].values())) == counts
