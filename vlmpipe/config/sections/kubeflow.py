"""The run file's `kubeflow` section: the cluster in which the pipeline runs. Names follow Kubernetes' own."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from trainer.config.base import Section

Name = Annotated[str, Field(pattern=r"^([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?)?$")]
LabelKey = Annotated[str, Field(pattern=r"^([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$")]
LabelValue = Annotated[str, Field(pattern=r"^([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?$")]


class TolerationConfig(Section):
    """A taint of nodes that the jobs tolerate."""

    key: LabelKey = Field(description="Key of the taint.")
    value: LabelValue = Field("", description="Value of the taint; empty for any.")
    effect: Literal["", "NoSchedule", "PreferNoSchedule", "NoExecute"] = Field(
        "", description="Effect of the taint; empty for any."
    )


class KubeflowConfig(Section):
    """Where and how the jobs run on a Kubernetes cluster with Kubeflow. Used by --target kubeflow only."""

    endpoint: str = Field(
        "", description="Address of Kubeflow Pipelines, for vlmpipe submit; empty takes KF_PIPELINES_ENDPOINT."
    )
    namespace: Name = Field(
        "", description="Namespace of the runs on a Kubeflow for several users; empty for one user."
    )
    experiment: str = Field("vlmpipe", min_length=1, description="Experiment that the runs belong to.")
    runtime: Annotated[Name, Field(min_length=1)] = Field(
        "torch-distributed", description="ClusterTrainingRuntime of the jobs; one whose policy is torch."
    )
    service_account: Name = Field(
        "", description="Kubernetes service account of the jobs' pods; empty takes the runtime's."
    )
    queue: Name = Field("", description="Kueue's LocalQueue in which the jobs wait for quota; empty for none.")
    node_selector: dict[LabelKey, LabelValue] = Field(
        default_factory=dict,
        description="Labels of the nodes to run on, for example {cloud.google.com/gke-accelerator: nvidia-l4}.",
    )
    tolerations: tuple[TolerationConfig, ...] = Field(
        (), max_length=32, description="Tolerated taints; nvidia.com/gpu always is, on nodes with GPUs."
    )
    cpus: float = Field(
        0.0, ge=0, description="CPUs that a node's pod asks for; 0 takes what cluster.machine_type has, less one."
    )
    memory_gib: float = Field(
        0.0, ge=0, description="GiB of memory that a node's pod asks for; 0 takes 4/5 of cluster.machine_type's."
    )
