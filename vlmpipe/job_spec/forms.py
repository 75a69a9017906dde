"""The form of a job's spec as it is built here: the CustomJobSpec of Vertex AI's API, in snake_case."""

from __future__ import annotations

from typing import NotRequired, TypedDict


class Variable(TypedDict):
    name: str
    value: str


class MachineSpec(TypedDict):
    machine_type: str
    accelerator_type: NotRequired[str]
    accelerator_count: NotRequired[int]
    reservation_affinity: NotRequired[dict[str, object]]


class ContainerSpec(TypedDict):
    image_uri: str
    command: NotRequired[list[str]]  # a Reduction Server has its image's own
    args: NotRequired[list[str]]
    env: NotRequired[list[Variable]]


class PythonPackageSpec(TypedDict):
    executor_image_uri: str
    package_uris: list[str]
    python_module: str
    args: list[str]
    env: NotRequired[list[Variable]]


class DiskSpec(TypedDict):
    boot_disk_type: str
    boot_disk_size_gb: int


class Node(TypedDict):
    """A worker pool without its number of replicas."""

    machine_spec: MachineSpec
    container_spec: NotRequired[ContainerSpec]  # or a package
    python_package_spec: NotRequired[PythonPackageSpec]
    nfs_mounts: NotRequired[list[dict[str, object]]]
    lustre_mounts: NotRequired[list[dict[str, object]]]
    disk_spec: NotRequired[DiskSpec]  # a Reduction Server has Vertex AI's default


class WorkerPool(Node):
    replica_count: int


class Scheduling(TypedDict, total=False):
    timeout: str
    strategy: str
    max_wait_duration: str
    restart_job_on_worker_restart: bool
    disable_retries: bool


class CustomJobSpec(TypedDict):
    worker_pool_specs: list[WorkerPool]
    scheduling: Scheduling
    base_output_directory: dict[str, str]
    service_account: NotRequired[str]
    network: NotRequired[str]
    reserved_ip_ranges: NotRequired[list[str]]
    psc_interface_config: NotRequired[dict[str, object]]
    tensorboard: NotRequired[str]
    enable_web_access: NotRequired[bool]
    enable_dashboard_access: NotRequired[bool]
    persistent_resource_id: NotRequired[str]
