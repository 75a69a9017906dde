"""The machines of a job: those of the catalogue, or for a local run this one, which all its launchers share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vlmpipe.catalog.machines import Device, Gpu, Machine, load_catalog
from vlmpipe.catalog.this_machine import NAME, LocalMachine
from vlmpipe.config.run_config import RunConfig
from vlmpipe.config.sections.cluster import ClusterConfig, JobMachineConfig

# What the run file calls a GPU that the catalogue does not have: only whether there is one is read where it stands.
ANY_GPU = "NVIDIA_L4"


@dataclass(frozen=True)
class Nodes:
    """The nodes of one job. `machine` is what one of them has; None where nothing is known of it. A `device` that is no
    `Gpu` computes at an unknown rate."""

    cluster: ClusterConfig
    machine: Machine | None
    device: Device | None


def nodes_of(config: RunConfig, job: str, here: LocalMachine | None = None) -> Nodes:
    """The nodes of a job. `here`: of a config from `on_this_machine`."""
    cluster = config.cluster.of_job(job)
    if here:
        return Nodes(cluster, launcher_share(here, cluster.replica_count), here.gpus[0] if here.gpus else None)
    catalog = load_catalog()
    return Nodes(cluster, catalog.machines.get(cluster.machine_type), catalog.gpus.get(cluster.accelerator_type))


def launcher_share(here: LocalMachine, launchers: int) -> Machine:
    """Share of this machine for each launcher of a job. Launchers talk to each other as GPUs of one machine do."""
    gpu = here.gpus[0] if here.gpus and isinstance(here.gpus[0], Gpu) else None
    return Machine(
        machine_type=NAME,
        vcpus=max(1, here.cores // launchers),
        memory_gib=here.free_bytes / 2**30 / launchers,
        memory_share=1.0,
        nic_gbps=8 * gpu.link_gbytes_per_s if gpu else 1.0,
        boot_disk_types=(),
        source=NAME,
        date="",
    )


def on_this_machine(config: RunConfig, here: LocalMachine) -> RunConfig:
    """The run file as a local run takes it: every job on this machine, each rank with a GPU of its own where there is
    one."""

    def machine(job: str) -> JobMachineConfig:
        cluster = config.cluster.of_job(job)
        gpus = len(here.gpus) // cluster.replica_count
        return JobMachineConfig.model_construct(processes_per_replica=cluster.processes, **_machine(here, gpus))

    processes = config.cluster.processes
    changes = {
        "processes_per_replica": processes,
        "features_machine": machine("cache_features"),
        "evaluate_machine": machine("evaluate"),
        "reduction_server": None,
        "capacity_fallback": (),
        **_machine(here, processes if here.gpus else 0),
    }
    return config.model_copy(update={"cluster": config.cluster.model_copy(update=changes)})


def too_few_gpus(config: RunConfig, here: LocalMachine) -> str:
    """Why training could not start, as `vlmpipe.trainer.preflight.devices` refuses it; empty where it can."""
    ranks, gpus = config.cluster.world_size, len(here.gpus)
    if not 0 < gpus < ranks:
        return ""
    return (
        f"{ranks} processes are to train on this machine, which has {gpus} GPU{'s' if gpus > 1 else ''}: start fewer "
        f"(cluster.replica_count=1 cluster.processes_per_replica={gpus}), or train on the CPU (CUDA_VISIBLE_DEVICES "
        "set to nothing)"
    )


def _machine(here: LocalMachine, gpus: int) -> dict[str, Any]:
    if not gpus:
        return {"machine_type": NAME, "accelerator_type": "", "accelerator_count": 0}
    first = here.gpus[0]
    kind = first.accelerator_type if isinstance(first, Gpu) else ANY_GPU
    return {"machine_type": NAME, "accelerator_type": kind, "accelerator_count": gpus}
