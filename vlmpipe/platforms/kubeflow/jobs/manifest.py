"""TrainJob manifests from CustomJob specs: plain data in, plain data out.

The form is trainer.kubeflow.org/v1alpha1 of Kubeflow Trainer 2.3 (github.com/kubeflow/trainer,
pkg/apis/trainer/v1alpha1/trainjob_types.go): pods are changed by `runtimePatches`, which 2.0 and 2.1 do not have, and
2.2 has without `terminationGracePeriodSeconds`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence

from google.cloud.aiplatform_v1.types import custom_job as api

from vlmpipe.config.sections.kubeflow import SHARED_MEMORY, KubeflowConfig
from vlmpipe.job_spec.worker_pools import CHIEF_POOL, REDUCTION_SERVER_POOL
from vlmpipe.platforms.jobs.pools import NODE_POOLS, processes_of, stop_grace_s
from vlmpipe.trainer.errors import ConfigError

GROUP, VERSION, PLURAL = "trainer.kubeflow.org", "v1alpha1", "trainjobs"
NODE = "node"  # how Trainer calls the replicated job of the nodes, and the container in their pods
MANAGER = "vlmpipe/job-step"  # whose patch it is: a name below a domain, Trainer's webhook demands
GPU = "nvidia.com/gpu"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
RUN_URI_ANNOTATION = "vlmpipe/run-uri"
# Pods are called <job>-node-0-<rank>-<5 characters>, and that must be a host's name of at most 63.
LONGEST_NAME = 40
DIGEST_LETTERS = 8
STOP_GRACE_S = 120  # from SIGTERM to SIGKILL: time to save a checkpoint; Kubernetes' own 30 s are few
RESERVED = re.compile(r"PET_(NNODES|NPROC_PER_NODE|NODE_RANK|MASTER_ADDR|MASTER_PORT)")


def job_name(display_name: str, *parts: str) -> str:
    """The TrainJob's name, which is the same when a step is retried, so that it finds its job.

    Args:
        display_name: the job's name for people, cut to fit.
        parts: identify this start of this run.
    """
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:DIGEST_LETTERS]
    slug = re.sub(r"[^a-z0-9]+", "-", display_name.lower()).strip("-")
    slug = slug if slug[:1].isalpha() else f"job-{slug}"
    return f"{slug[: LONGEST_NAME - DIGEST_LETTERS - 1].rstrip('-')}-{digest}"


def train_job(
    name: str, job: api.CustomJobSpec, placement: KubeflowConfig, *, labels: Mapping[str, str], run_uri: str
) -> dict[str, object]:
    """The manifest of a TrainJob that does the same as `job`.

    Args:
        placement: where and how pods run; `cpus` and `memory_gib` are requested for each node, 0 requests none.

    Raises ConfigError for what a TrainJob cannot do: a Reduction Server or evaluators, pools that differ in more than
    their size, no image, and variables that belong to the runtime.
    """
    chief = _only_kind_of_node(job)
    container = chief.container_spec
    _require_own_variables(container.env)
    nodes = sum(job.worker_pool_specs[pool].replica_count for pool in _training_pools(job))
    gpus = chief.machine_spec.accelerator_count
    trainer = {
        "image": container.image_uri,
        "command": list(container.command),
        "args": list(container.args),
        "env": _env(container.env, placement),
        "numNodes": int(nodes),
        "numProcPerNode": processes_of(chief),
        "resourcesPerNode": _resources(gpus, placement),
    }
    own_labels = {**labels, **({QUEUE_LABEL: placement.queue} if placement.queue else {})}
    timeout_s = int(job.scheduling.timeout.total_seconds())
    spec = {
        "runtimeRef": {"apiGroup": GROUP, "kind": "ClusterTrainingRuntime", "name": placement.runtime},
        "trainer": {key: value for key, value in trainer.items() if value},
        "runtimePatches": [_patch(gpus, placement, labels, grace_s=int(stop_grace_s(job, STOP_GRACE_S)))],
        **({"activeDeadlineSeconds": timeout_s} if timeout_s else {}),
    }
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "TrainJob",
        "metadata": {"name": name, "labels": own_labels, "annotations": {RUN_URI_ANNOTATION: run_uri}},
        "spec": spec,
    }


def _training_pools(job: api.CustomJobSpec) -> list[int]:
    return [pool for pool in NODE_POOLS if pool < len(job.worker_pool_specs)]


def _only_kind_of_node(job: api.CustomJobSpec) -> api.WorkerPoolSpec:
    """The pool that stands for all: a TrainJob has one kind of node."""
    pools = job.worker_pool_specs
    if len(pools) > REDUCTION_SERVER_POOL:
        raise ConfigError(
            f"the job has {len(pools)} worker pools",
            expected="the chief and workers: a TrainJob has one kind of node, and the Reduction Server is a service of "
            "Vertex AI",
            fix="set cluster.reduction_server to null and train.trainer.roles to none",
        )
    chief = pools[CHIEF_POOL]
    for pool in _training_pools(job)[1:]:
        if _without_count(pools[pool]) != _without_count(chief):
            raise ConfigError("worker pools 0 and 1 differ", expected="equal nodes, as a TrainJob has them")
    if "/" not in chief.container_spec.image_uri:
        raise ConfigError(
            f"the job's image is {chief.container_spec.image_uri!r}",
            expected="the trainer image in a registry that the cluster reads",
            fix="set cluster.image_uri (make build makes the image)",
        )
    return chief


def _without_count(pool: api.WorkerPoolSpec) -> dict[str, object]:
    content = dict(api.WorkerPoolSpec.to_dict(pool))
    content.pop("replica_count", None)
    return content


def _require_own_variables(env: Sequence[api.EnvVar]) -> None:
    if taken := [variable.name for variable in env if RESERVED.fullmatch(variable.name)]:
        raise ConfigError(f"cluster.env sets {', '.join(taken)}", expected="names that the torch runtime does not set")


def _env(of_job: Sequence[api.EnvVar], placement: KubeflowConfig) -> list[dict[str, object]]:
    """Variables of the job, then those of section `kubeflow`."""
    plain = {**{variable.name: variable.value for variable in of_job}, **placement.env}
    secrets = placement.secrets().items()
    return [
        *({"name": name, "value": value} for name, value in plain.items()),
        *({"name": name, "valueFrom": {"secretKeyRef": {"name": where, "key": key}}} for name, (where, key) in secrets),
    ]


def _resources(gpus: int, placement: KubeflowConfig) -> dict[str, object]:
    """CPU and memory are asked for and not limited: what a machine has left, data loading may use."""
    requests = {}
    if placement.cpus:
        requests["cpu"] = f"{round(placement.cpus * 1000)}m"
    if placement.memory_gib:
        requests["memory"] = f"{round(placement.memory_gib * 1024)}Mi"
    limits = {GPU: str(gpus)} if gpus else {}
    return {key: value for key, value in (("requests", {**requests, **limits}), ("limits", limits)) if value}


def _patch(gpus: int, placement: KubeflowConfig, labels: Mapping[str, str], *, grace_s: int) -> dict[str, object]:
    """Pod settings beyond the runtime's. NCCL and data loaders use /dev/shm, of which a pod has 64 MiB."""
    tolerations = [{"key": GPU, "operator": "Exists"}] if gpus else []
    for toleration in placement.tolerations:
        operator = {"operator": "Equal", "value": toleration.value} if toleration.value else {"operator": "Exists"}
        effect = {"effect": toleration.effect} if toleration.effect else {}
        tolerations.append({"key": toleration.key, **operator, **effect})
    volumes: list[dict[str, object]] = [{"name": "dshm", "emptyDir": {"medium": "Memory"}}]
    mounts = [{"name": "dshm", "mountPath": SHARED_MEMORY}]
    for number, volume in enumerate(placement.volumes):
        volumes.append({"name": f"volume-{number}", "persistentVolumeClaim": {"claimName": volume.claim}})
        mounts.append({"name": f"volume-{number}", "mountPath": volume.mount_path})
    pod = {
        "serviceAccountName": placement.service_account,
        "nodeSelector": dict(placement.node_selector),
        "tolerations": tolerations,
        "volumes": volumes,
        "containers": [{"name": NODE, "volumeMounts": mounts}],
        "terminationGracePeriodSeconds": grace_s,
    }
    template = {"metadata": {"labels": dict(labels)}, "spec": {key: value for key, value in pod.items() if value}}
    job = {"name": NODE, "template": {"spec": {"template": template}}}
    return {"manager": MANAGER, "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [job]}}}}
