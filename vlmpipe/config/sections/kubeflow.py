"""The run file's `kubeflow` section: the cluster in which the pipeline runs. Names follow Kubernetes' own."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Annotated, Literal

from pydantic import Field, model_validator

from vlmpipe.trainer.config.base import Section
from vlmpipe.trainer.storage.base import in_bucket

SUBDOMAIN = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"  # RFC 1123, as names of objects are
Name = Annotated[str, Field(pattern=rf"^({SUBDOMAIN})?$", max_length=253)]
QueueName = Annotated[str, Field(pattern=rf"^({SUBDOMAIN})?$", max_length=63)]  # it is the value of a label
Namespace = Annotated[str, Field(pattern=r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?)?$", max_length=63)]
LabelKey = Annotated[
    str, Field(pattern=rf"^({SUBDOMAIN}/)?[A-Za-z0-9]([-A-Za-z0-9_.]{{0,61}}[A-Za-z0-9])?$", max_length=253)
]
SHARED_MEMORY = "/dev/shm"  # a volume of every job's pod
EnvName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,127}$")]
SecretKey = Annotated[str, Field(pattern=rf"^{SUBDOMAIN}/\.?[A-Za-z0-9_-][A-Za-z0-9._-]*$", max_length=253)]
LabelValue = Annotated[str, Field(pattern=r"^([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?$")]


class TolerationConfig(Section):
    """A taint of nodes that the jobs tolerate."""

    key: LabelKey = Field(description="Key of the taint.")
    value: LabelValue = Field("", description="Value of the taint; empty for any.")
    effect: Literal["", "NoSchedule", "PreferNoSchedule", "NoExecute"] = Field(
        "", description="Effect of the taint; empty for any."
    )


class VolumeConfig(Section):
    """A volume that every pod of the run mounts, such as an NFS share: ReadWriteMany, unless there is one node."""

    claim: Annotated[Name, Field(min_length=1)] = Field(description="PersistentVolumeClaim in the run's namespace.")
    mount_path: str = Field(pattern=r"^/[A-Za-z0-9._/-]*[A-Za-z0-9._-]$", description="Folder where pods see it.")


class KubeflowConfig(Section):
    """Where and how the jobs run on a Kubernetes cluster with Kubeflow. Used by --target kubeflow only."""

    endpoint: str = Field(
        "", description="Address of Kubeflow Pipelines, for vlmpipe submit; empty takes KF_PIPELINES_ENDPOINT."
    )
    namespace: Namespace = Field(
        "", description="Namespace of the runs on a Kubeflow for several users; empty for one user."
    )
    experiment: str = Field("vlmpipe", min_length=1, description="Experiment that the runs belong to.")
    runtime: Annotated[Name, Field(min_length=1)] = Field(
        "torch-distributed", description="ClusterTrainingRuntime of the jobs, with the policy torch."
    )
    service_account: Name = Field(
        "", description="Kubernetes service account of the jobs' pods; empty takes the runtime's."
    )
    queue: QueueName = Field("", description="Kueue's LocalQueue in which the jobs wait for quota; empty for none.")
    node_selector: dict[LabelKey, LabelValue] = Field(
        default_factory=dict,
        description="Labels of the nodes to run on, for example {cloud.google.com/gke-accelerator: nvidia-l4}.",
    )
    tolerations: tuple[TolerationConfig, ...] = Field(
        (), max_length=32, description="Tolerated taints; nvidia.com/gpu always is, on nodes with GPUs."
    )
    s3_endpoint: str = Field(
        "",
        pattern=r"^(https?://[A-Za-z0-9.-]+(:[0-9]+)?/?)?$",
        description="Server of s3:// addresses, such as http://minio-service.kubeflow:9000; empty for Amazon's.",
    )
    secret_env: dict[EnvName, SecretKey] = Field(
        default_factory=dict,
        description="Variables of every pod from Kubernetes secrets, each as SECRET/KEY, for example "
        "{AWS_ACCESS_KEY_ID: mlpipeline-minio-artifact/accesskey}.",
    )
    volumes: tuple[VolumeConfig, ...] = Field(
        (), max_length=16, description="Volumes of every pod; output.root_uri may be a folder on one."
    )
    cpus: float = Field(
        0.0, ge=0, description="CPUs that a node's pod requests; 0 takes those of cluster.machine_type, less one."
    )
    memory_gib: float = Field(
        0.0, ge=0, description="GiB of memory that a node's pod requests; 0 takes 4/5 of cluster.machine_type's."
    )

    @model_validator(mode="after")
    def _mounts(self) -> KubeflowConfig:
        folders = [PurePosixPath(SHARED_MEMORY), *(PurePosixPath(volume.mount_path) for volume in self.volumes)]
        if taken := sorted({str(folder) for folder in folders if folders.count(folder) > 1}):
            raise ValueError(f"volumes mount {', '.join(taken)} twice, or in the place of the pods' shared memory")
        return self

    @property
    def env(self) -> dict[str, str]:
        """Variables of every pod that are no secrets."""
        return {"AWS_ENDPOINT_URL_S3": self.s3_endpoint} if self.s3_endpoint else {}

    def secrets(self) -> dict[str, tuple[str, str]]:
        """Secret and key of each variable of `secret_env`."""
        split = {name: where.partition("/") for name, where in self.secret_env.items()}
        return {name: (secret, key) for name, (secret, _, key) in split.items()}

    def reaches(self, uri: str) -> bool:
        """Return whether every pod can open `uri`: an address in a bucket, or a path on a volume."""
        return in_bucket(uri) or self._volume_of(uri) is not None

    def claim_uri(self, uri: str) -> str:
        """The address by which KServe finds it: pvc://claim/path for a path on a volume, others as they are."""
        volume = self._volume_of(uri)
        if volume is None:
            return uri
        return f"pvc://{volume.claim}/{PurePosixPath(uri).relative_to(volume.mount_path)}"

    def _volume_of(self, path: str) -> VolumeConfig | None:
        folder = PurePosixPath(path)
        if ".." in folder.parts:
            return None
        return next((volume for volume in self.volumes if folder.is_relative_to(volume.mount_path)), None)
