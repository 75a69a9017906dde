"""A CustomJob's spec as a TrainJob, and what a TrainJob's status means: plain data."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes.kubernetes.pods import condition, pod
from tests.fakes.kubernetes.train_job_rules import denials, pod_name_violation, unknown_fields, violations
from tests.support.pipelines.train_jobs import IMAGE, PLACEMENT, RUN_URI, STORED, made, pools
from vlmpipe.config.sections.kubeflow import KubeflowConfig
from vlmpipe.platforms.kubeflow.jobs.manifest import LONGEST_NAME, job_name
from vlmpipe.platforms.kubeflow.jobs.status import Ended, cause, job_state, nodes_of
from vlmpipe.trainer.errors import ConfigError


def pod_of(job: dict[str, Any]) -> dict[str, Any]:
    (patch,) = job["spec"]["runtimePatches"]
    (replicated,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    assert replicated["name"] == "node"
    found: dict[str, Any] = replicated["template"]["spec"]["template"]
    return found


def test_chief_and_workers_become_nodes_that_are_all_alike() -> None:
    trainer = made(pools(1, 3.0, gpus=2, env=[{"name": "HF_HUB_OFFLINE", "value": "1"}]))["spec"]["trainer"]
    assert trainer == {
        "image": IMAGE,
        "command": ["python", "-m", "vlmpipe.trainer.launch"],
        "args": ["--nproc-per-node", "2", "--", "vlmpipe.trainer.train", "--config", f"{RUN_URI}/run.json"],
        "env": [{"name": "HF_HUB_OFFLINE", "value": "1"}],
        "numNodes": 4,
        "numProcPerNode": 2,
        "resourcesPerNode": {
            "requests": {"cpu": "7500m", "memory": "24576Mi", "nvidia.com/gpu": "2"},
            "limits": {"nvidia.com/gpu": "2"},
        },
    }


def test_pods_get_the_account_the_nodes_the_taints_and_shared_memory() -> None:
    job = made(pools(1, gpus=2))
    assert pod_of(job)["metadata"] == {"labels": {"vlmpipe-step": "train"}}
    assert pod_of(job)["spec"] == {
        "serviceAccountName": "trainer",
        "nodeSelector": {"cloud.google.com/gke-accelerator": "nvidia-l4"},
        "tolerations": [
            {"key": "nvidia.com/gpu", "operator": "Exists"},
            {"key": "team", "operator": "Equal", "value": "vision", "effect": "NoSchedule"},
        ],
        "volumes": [{"name": "dshm", "emptyDir": {"medium": "Memory"}}],
        "containers": [{"name": "node", "volumeMounts": [{"name": "dshm", "mountPath": "/dev/shm"}]}],
        "terminationGracePeriodSeconds": 120,
    }
    assert job["metadata"]["labels"] == {"vlmpipe-step": "train", "kueue.x-k8s.io/queue-name": "team-queue"}
    assert job["spec"]["activeDeadlineSeconds"] == 3600


def test_nodes_get_the_variables_secrets_and_volumes_of_every_pod() -> None:
    job = made(pools(1, env=[{"name": "HF_HUB_OFFLINE", "value": "1"}]), STORED)
    assert job["spec"]["trainer"]["env"] == [
        {"name": "HF_HUB_OFFLINE", "value": "1"},
        {"name": "AWS_ENDPOINT_URL_S3", "value": "http://minio.example.com:9000"},
        {"name": "AWS_ACCESS_KEY_ID", "valueFrom": {"secretKeyRef": {"name": "minio", "key": "accesskey"}}},
        {"name": "AWS_SECRET_ACCESS_KEY", "valueFrom": {"secretKeyRef": {"name": "minio", "key": "secretkey"}}},
    ]
    spec = pod_of(job)["spec"]
    assert spec["volumes"][1:] == [{"name": "volume-0", "persistentVolumeClaim": {"claimName": "team-data"}}]
    assert spec["containers"][0]["volumeMounts"][1:] == [{"name": "volume-0", "mountPath": "/mnt/team"}]


@pytest.mark.parametrize("placement", [PLACEMENT, STORED, KubeflowConfig()], ids=["everything", "storage", "nothing"])
@pytest.mark.parametrize("gpus", [0, 8])
def test_manifests_are_valid_for_the_api(placement: KubeflowConfig, gpus: int) -> None:
    job = made(pools(1, 15, gpus=gpus), placement)
    assert unknown_fields(job) == violations(job) == denials(job, {"torch-distributed"}) == []


@pytest.mark.parametrize(
    ("worker_pools", "said"),
    [
        (
            [*pools(1, 1), {**pools(2)[0], "container_spec": {"image_uri": "us-docker.pkg.dev/x/reductionserver"}}],
            "3 wor",
        ),
        ([*pools(1), *pools(1, gpus=1)], "differ"),
        (pools(1, image_uri="python"), "image is 'python'"),
        (pools(1, env=[{"name": "PET_NNODES", "value": "1"}]), "sets PET_NNODES"),
    ],
    ids=["reducers", "unlike nodes", "no image", "reserved"],
)
def test_jobs_that_a_train_job_cannot_express_are_refused(worker_pools: list[dict[str, Any]], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        made(worker_pools)


@pytest.mark.parametrize("display_name", ["digits-train", "a" * 63 + "-cache-features", "7b_LoRA train", "é"])
def test_a_name_is_a_host_name_with_room_for_that_of_its_pods(display_name: str) -> None:
    name = job_name(display_name, RUN_URI, "train", "1")
    assert len(name) <= LONGEST_NAME and pod_name_violation(name, nodes=1000) == ""
    job = made(pools(1)) | {"metadata": {"name": name}}
    assert violations(job) == []


def test_a_name_is_the_same_for_the_same_start_and_step_alone() -> None:
    starts = [
        (RUN_URI, "train", "1"),
        (RUN_URI, "train", "2"),
        (RUN_URI, "evaluate", "1"),
        (f"{RUN_URI}2", "train", "1"),
    ]
    assert len({job_name("digits", *one) for one in starts}) == 4
    assert job_name("digits", *starts[0]) == job_name("digits", *starts[0])


@pytest.mark.parametrize(
    ("job", "phase", "why"),
    [
        ({}, "created", ""),
        ({"status": {"conditions": [condition("Suspended", "Suspended", "TrainJob is suspended")]}}, "suspended",
         "Suspended: TrainJob is suspended"),
        ({"status": {"conditions": [condition("Suspended") | {"status": "False"}]}}, "created", ""),
        ({"status": {"jobsStatus": [{"name": "node", "active": 1}]}}, "running", ""),
        ({"status": {"conditions": [condition("Complete", "AllJobsCompleted", "done")]}}, "complete",
         "AllJobsCompleted: done"),
        ({"status": {"conditions": [condition("Suspended"), condition("Failed", "FailedJobs", "x")]}}, "failed",
         "FailedJobs: x"),
    ],
)  # fmt: skip
def test_conditions_give_the_state_of_a_job(job: dict[str, Any], phase: str, why: str) -> None:
    found = job_state({"metadata": {"name": "n"}, **job})
    assert (found.phase, found.why) == (phase, why)


def test_a_job_that_is_being_deleted_is_nothing_else() -> None:
    status = {"conditions": [condition("Complete")]}
    assert job_state({"metadata": {"deletionTimestamp": "now"}, "status": status}).phase == "deleting"


def test_nodes_tell_why_they_wait_and_how_they_ended() -> None:
    waiting = {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
    ended = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}
    again = pod(0, state={"running": {}}, last={"terminated": {"exitCode": 1}}, restarts=2)
    found = nodes_of([pod(3, unscheduled="0/3 nodes"), pod(2, state=waiting), pod(1, state=ended), again])
    assert [node.rank for node in found] == [0, 1, 2, 3]
    assert [node.waits for node in found] == ["", "", "ImagePullBackOff: no such image", "Unschedulable: 0/3 nodes"]
    assert [node.stuck for node in found] == [False, False, True, False]
    assert [node.started for node in found] == [True, True, False, False]
    assert found[0].restarts == 2 and found[0].ended == (Ended("pod-0", 1),)
    assert found[1].ended == (Ended("pod-1", 137, "OOMKilled"),)


def test_the_cause_is_the_most_informative_exit() -> None:
    ends = [Ended("a", 0), Ended("b", 1), Ended("c", 137), Ended("d", 65), Ended("e", 64)]
    assert cause(ends) == Ended("d", 65) and cause(ends[:3]) == Ended("c", 137) and cause(ends[:1]) is None
