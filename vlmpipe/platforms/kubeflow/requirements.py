"""Requirements of Kubeflow in a run file, and settings without effect there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from vlmpipe.config import service_forms as forms
from vlmpipe.config.rules.confinement import service_confinement_problems
from vlmpipe.config.service_forms import Form
from vlmpipe.config.validation_errors import Problem, show
from vlmpipe.platforms.requirements import (
    benchmark_image,
    hub_token,
    raise_problems,
    require_files,
    serving_image,
    violated,
)
from vlmpipe.trainer.config.external_trainer import WITH_ROLES

if TYPE_CHECKING:
    from vlmpipe.config.run_config import RunConfig

FIX = (
    "copy the missing fields from vlmpipe docs run-on-kubeflow into the run file; in a clone, make build config=FILE "
    "writes the images"
)
KUBEFLOW: Mapping[str, Form] = {"gcp.pipeline_image": forms.PULLABLE_IMAGE, "cluster.image_uri": forms.PULLABLE_IMAGE}
KSERVES_OWN = {
    "PYTHONPATH": "KServe refuses it from 0.18 on; expected a path inside the image, set by the image",
    "STORAGE_URI": "names the model's files for KServe; expected another name",
}
MAX_VARIABLES = 100
REACHED = "gs://bucket/folder, s3://bucket/folder or a folder on one of kubeflow.volumes"
# Fields of Vertex AI without effect on Kubeflow, and what applies there instead.
NOT_ON_KUBEFLOW = {
    "cluster.max_wait_duration": "pods wait for nodes until cluster.timeout",
    "cluster.disable_retries": "the runtime's failurePolicy decides",
    "cluster.reservation_affinity": "the cluster's node pools use reservations",
    "cluster.nfs_mounts": "the runtime's pod template mounts volumes",
    "cluster.lustre_mounts": "the runtime's pod template mounts volumes",
    "cluster.reduction_server": "it is a service of Vertex AI; NCCL sums gradients among the nodes",
    "cluster.restart_job_on_worker_restart": "the runtime's failurePolicy decides",
    "gcp.network": "pods are in the cluster's network",
    "gcp.reserved_ip_ranges": "pods are in the cluster's network",
    "gcp.psc_interface_config": "pods are in the cluster's network",
    "gcp.tensorboard": "TensorBoard's files are in the run's folder, under logs/",
    "gcp.enable_web_access": "kubectl exec leads into a pod",
    "gcp.enable_dashboard_access": "kubectl port-forward leads to a pod's port",
    "gcp.encryption_spec_key_name": "the cluster's disks have their own",
    "gcp.persistent_resource_id": "the cluster's nodes exist already",
    "notify.email": "notify.webhook is notified",
}


def root_uri_of(config: RunConfig) -> str:
    """Root of the run's files: `output.root_uri` where pods reach it."""
    root_uri = config.output.root_uri
    return root_uri if config.kubeflow.reaches(root_uri) else config.gcp.pipeline_root


def require_kubeflow(config: RunConfig) -> None:
    """Raise RunFileError unless the run file has what Kubeflow needs, and nothing that it cannot do."""
    problems = violated(config, KUBEFLOW)
    if not config.kubeflow.reaches(root_uri_of(config)):
        text = f"found {show(config.output.root_uri)}, expected {REACHED}: pods share no other"
        problems.append(Problem("output.root_uri", text))
    registry = config.register_.registry
    if registry and not config.kubeflow.reaches(registry):
        text = f"found {show(registry)}, expected {REACHED}: Vertex AI Model Registry is not there"
        problems.append(Problem("register.registry", text))
    for name in sorted(set(config.kubeflow.secret_env) & {*config.cluster.env, *config.kubeflow.env}):
        problems.append(Problem(f"kubeflow.secret_env.{name}", "is set by another field as well; expected one of them"))
    variables = {*config.cluster.env, *config.kubeflow.env, *config.kubeflow.secret_env}
    if len(variables) > MAX_VARIABLES:
        text = (
            f"found {len(variables)} variables with those of cluster.env, expected at most {MAX_VARIABLES}: a TrainJob "
        )
        problems.append(Problem("kubeflow.secret_env", f"{text}takes 128, and jobs have their own"))
    taken = sorted(KSERVES_OWN.keys() & config.deploy.env.keys()) if config.deploy else []
    problems += [Problem(f"deploy.env.{name}", KSERVES_OWN[name]) for name in taken]
    if config.deploy and config.deploy.cloud_run:
        text = (
            "found, expected none on Kubeflow: its steps have no account of Google Cloud, and KServe serves the model"
        )
        problems.append(Problem("deploy.cloud_run", text))
    problems += [*serving_image(config, forms.PULLABLE_IMAGE), *hub_token(config)]
    problems += [*benchmark_image(config, forms.PULLABLE_IMAGE), *service_confinement_problems(config, "gcp.project")]
    if trainer := config.train.trainer:
        if trainer.kind == "package":
            text = "found package, expected command: a TrainJob runs an image and installs no packages"
            problems.append(Problem("train.trainer.kind", text))
        if trainer.launch in WITH_ROLES:
            text = f"found {trainer.launch}, expected another launch: a TrainJob has one kind of node and no roles"
            problems.append(Problem("train.trainer.launch", text))
    raise_problems(config, "Kubeflow", problems, fix=FIX)


def require_reached_files(config: RunConfig) -> None:
    """Raise RunFileError unless pods can read the run's files. A pipeline can be compiled without."""
    require_files(config, "Kubeflow", config.kubeflow.reaches, REACHED)


def unused_on_kubeflow(config: RunConfig) -> list[Problem]:
    """Settings that have no effect on Kubeflow, each with what applies instead."""
    result = []
    if config.cluster.strategies != ("standard",):
        named = ", ".join(config.cluster.strategies)
        path = "cluster.capacity_fallback" if config.cluster.capacity_fallback else "cluster.scheduling_strategy"
        text = f"{named}: has no effect on Kubeflow: kubeflow.node_selector says which nodes to take"
        result.append(Problem(path, text))
    for path, instead in NOT_ON_KUBEFLOW.items():
        section, _, field = path.partition(".")
        content = getattr(config, section)
        if getattr(content, field) and field in content.model_fields_set:
            result.append(Problem(path, f"has no effect on Kubeflow: {instead}"))
    return result
