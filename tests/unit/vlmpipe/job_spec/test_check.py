"""Job specs that Vertex AI would refuse or misread are refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from vlmpipe.job_spec.check import check_job_spec
from vlmpipe.job_spec.parse import parse_job_spec
from vlmpipe.trainer.errors import ConfigError

REDUCERS = "us-docker.pkg.dev/vertex-ai-restricted/training/reductionserver:latest"
Pool = dict[str, Any]


def node(replica_count: float, machine_type: str = "a2-highgpu-1g") -> Pool:
    return {
        "machine_spec": {
            "machine_type": machine_type, "accelerator_type": "NVIDIA_TESLA_A100", "accelerator_count": 1.0
        },
        "replica_count": replica_count,
        "container_spec": {"image_uri": "trainer", "env": [{"name": "A", "value": "b"}]},
        "disk_spec": {"boot_disk_type": "pd-ssd", "boot_disk_size_gb": 500.0},
    }  # fmt: skip


def reducers(replica_count: float = 2.0) -> Pool:
    return {
        "machine_spec": {"machine_type": "n1-highcpu-16"},
        "replica_count": replica_count,
        "container_spec": {"image_uri": REDUCERS},
    }


def test_whole_numbers_that_arrive_as_floats_become_integers() -> None:
    job = parse_job_spec({"worker_pool_specs": [node(1.0), node(3.0), reducers()]})
    assert [pool.replica_count for pool in job.worker_pool_specs] == [1, 3, 2]
    assert job.worker_pool_specs[1].machine_spec.accelerator_count == 1
    assert job.worker_pool_specs[0].disk_spec.boot_disk_size_gb == 500


def test_the_given_spec_is_not_changed() -> None:
    spec = {"worker_pool_specs": [node(1.0)]}
    before = copy.deepcopy(spec)
    parse_job_spec(spec)
    assert spec == before


@pytest.mark.parametrize(
    ("pools", "words"),
    [
        ([], "worker_pool_specs: found no pool"),
        ([node(2)], "exactly 1: pool 0 is the chief"),
        ([node(1), reducers()], "found the Reduction Server image"),
        ([node(1), {}, reducers()], "worker_pool_specs[1]: found no replica"),
        ([node(1), node(0), reducers()], "worker_pool_specs[1]: found no replica"),
        ([node(1), node(1), node(1), node(1), node(1)], "found 5 pools"),
        ([{"replica_count": 1, "machine_spec": {"machine_type": "a"}}], "image_uri: found nothing"),
        ([{"replica_count": 1, "container_spec": {"image_uri": "a"}}], "machine_type: found nothing"),
        ([node(1) | {"disk_spec": {"persistent_disk_size_gb": 1}}], "keep data on Cloud Storage"),
        ([node(1) | {"network": "n"}], "worker_pool_specs[0].network: found a field that WorkerPoolSpec does not have"),
        ([node(1) | {"container_spec": {"image_uri": "a", "args": "--x"}}], "expected: a list"),
        ([node(1) | {"container_spec": {"image_uri": "a", "env": [{"name": "A", "value": 1}]}}], "expected: text"),
        ([node(1) | {"replica_count": True}], "expected: a whole number"),
        (["chief"], "expected: an object with fields of WorkerPoolSpec"),
    ],
)
def test_pools_that_vertex_would_misread_are_refused(pools: list[Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_job_spec({"worker_pool_specs": pools})
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"scheduling": {"strategy": "spot"}}, "did you mean SPOT?"),
        ({"scheduling": {"timeout": "3600"}}, 'for example "3600s"'),
        ({"scheduling": {"timeout": 3600}}, 'for example "3600s"'),
        ({"enableWebAccess": True}, "write enable_web_access"),
        ({"enable_web_access": "yes"}, "expected: true or false"),
        ({"service_acount": "a@b"}, "did you mean service_account?"),
    ],
)
def test_fields_of_the_job_are_checked_too(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_job_spec({"worker_pool_specs": [node(1)], **fields})
    assert words in str(caught.value)


def test_flex_start_needs_the_same_machine_in_all_pools() -> None:
    spec = {"worker_pool_specs": [node(1), node(1), reducers()], "scheduling": {"strategy": "FLEX_START"}}
    with pytest.raises(ConfigError, match="the same machine in all pools"):
        check_job_spec(spec)
