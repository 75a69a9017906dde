"""Requirements of the Kubeflow target, and settings that have no effect there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from vlmpipe.config.validation_errors import Problem, RunFileError, show

if TYPE_CHECKING:
    from vlmpipe.config.run_config import RunConfig

IMAGE = re.compile(r"^[a-z0-9.-]+(:[0-9]+)?/[a-z0-9._/-]+(:[A-Za-z0-9._-]{1,128})?(@sha256:[0-9a-f]{64})?$")
# Fields that Vertex AI understands and a cluster does not, with what holds there instead.
NOT_THERE = {
    "cluster.max_wait_duration": "pods wait for nodes until cluster.timeout",
    "cluster.reduction_server": "it is a service of Vertex AI; NCCL sums gradients among the nodes",
    "cluster.restart_job_on_worker_restart": "the runtime's failurePolicy decides",
    "gcp.network": "pods are in the cluster's network",
    "gcp.psc_interface_config": "pods are in the cluster's network",
    "gcp.tensorboard": "TensorBoard's files lie in the run's folder, under logs/",
    "gcp.enable_web_access": "kubectl exec leads into a pod",
    "gcp.encryption_spec_key_name": "the cluster's disks have their own",
    "gcp.persistent_resource_id": "the cluster's nodes are there already",
    "notify.email": "notify.webhook is notified",
}


def require_kubeflow(config: RunConfig) -> None:
    """Raise RunFileError unless the run file has what Kubeflow needs, and nothing that it cannot do."""
    if problems := list(_problems(config)):
        raise RunFileError(f"run file {config.name}, for Kubeflow", problems)


def unused_on_kubeflow(config: RunConfig) -> list[Problem]:
    """What the run file asks for in so many words and has no effect there, each with what holds instead."""
    found = []
    if config.cluster.strategies != ("standard",):
        named = ", ".join(config.cluster.strategies)
        path = "cluster.capacity_fallback" if config.cluster.capacity_fallback else "cluster.scheduling_strategy"
        text = f"{named}: has no effect on Kubeflow: kubeflow.node_selector says which nodes to take"
        found.append(Problem(path, text))
    for path, instead in NOT_THERE.items():
        section, _, field = path.partition(".")
        content = getattr(config, section)
        if getattr(content, field) and field in content.model_fields_set:
            found.append(Problem(path, f"has no effect on Kubeflow: {instead}"))
    return found


def _problems(config: RunConfig) -> Iterator[Problem]:
    for path, image in (
        ("gcp.pipeline_image", config.gcp.pipeline_image),
        ("cluster.image_uri", config.cluster.image_uri),
    ):
        if not IMAGE.match(image):
            found = f"found {show(image)}" if image else "missing"
            yield Problem(path, f"{found}, expected an image that the cluster can pull, best by digest")
    root = config.root_uri("kubeflow")
    if not root.startswith("gs://"):
        text = f"found {show(config.output.root_uri)}, expected gs://bucket/folder, here or in gcp.pipeline_root: pods "
        yield Problem("output.root_uri", f"{text}share no folder")
    registry = config.register_.registry
    if registry and not registry.startswith("gs://"):
        text = "expected gs://: Vertex AI Model Registry and folders are not there"
        yield Problem("register.registry", f"found {show(registry)}, {text}")
