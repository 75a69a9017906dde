"""The form of a job's spec as it was read: fields of the API's types. One that is unset or unreadable is missing."""

from __future__ import annotations

from typing import Literal, TypedDict

from vlmpipe.job_spec.forms import Scheduling

TaskKind = Literal["container_spec", "python_package_spec"]
TASKS: tuple[TaskKind, ...] = ("container_spec", "python_package_spec")
MountKind = Literal["nfs_mounts", "lustre_mounts"]


class ReadVariable(TypedDict, total=False):
    name: str
    value: str


class ReadTask(TypedDict, total=False):
    """The words and variables of a replica's program."""

    command: list[str]  # of a container only
    args: list[str]
    env: list[ReadVariable]


class ReadContainer(ReadTask, total=False):
    image_uri: str


class ReadPackage(ReadTask, total=False):
    executor_image_uri: str
    package_uris: list[str]
    python_module: str


class ReadReservation(TypedDict, total=False):
    reservation_affinity_type: str
    key: str
    values: list[str]


class ReadMachine(TypedDict, total=False):
    machine_type: str
    accelerator_type: str
    accelerator_count: int
    gpu_partition_size: str
    tpu_topology: str
    reservation_affinity: ReadReservation


class ReadDisk(TypedDict, total=False):
    boot_disk_type: str
    boot_disk_size_gb: int


class ReadMount(TypedDict, total=False):
    """An NFS share (server, path) or a Lustre file system."""

    server: str
    path: str
    instance_ip: str
    volume_handle: str
    filesystem: str
    mount_point: str


class ReadPool(TypedDict, total=False):
    machine_spec: ReadMachine
    container_spec: ReadContainer
    python_package_spec: ReadPackage
    replica_count: int
    nfs_mounts: list[ReadMount]
    lustre_mounts: list[ReadMount]
    disk_spec: ReadDisk


class ReadPeering(TypedDict, total=False):
    domain: str
    target_project: str
    target_network: str


class ReadAttachment(TypedDict, total=False):
    """Private Service Connect."""

    network_attachment: str
    dns_peering_configs: list[ReadPeering]


class ReadSpec(TypedDict, total=False):
    worker_pool_specs: list[ReadPool]
    scheduling: Scheduling
    service_account: str
    network: str
    reserved_ip_ranges: list[str]
    psc_interface_config: ReadAttachment
    persistent_resource_id: str
