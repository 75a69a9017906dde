"""Vertex AI quotas that a run's jobs and its endpoint count against."""

from __future__ import annotations

from collections import Counter

from vlmpipe.catalog.machines import load_catalog
from vlmpipe.config.run_config import RunConfig
from vlmpipe.job_spec.build import capacity_options, job_spec, jobs_of
from vlmpipe.job_spec.forms import MachineSpec
from vlmpipe.trainer.storage.base import join_uri

# As error messages and quota requests of others spell them, read on 2026-11-22. Of other GPUs none was seen.
GPU_NAMES = {
    "NVIDIA_TESLA_T4": "t4",
    "NVIDIA_L4": "l4",
    "NVIDIA_TESLA_A100": "a100",
    "NVIDIA_A100_80GB": "a100_80gb",
    "NVIDIA_H100_80GB": "h100",
}
PREEMPTIBLE = ("SPOT", "FLEX_START")  # flex-start machines are not preempted, but count there
CPU_FAMILIES = ("n1-", "e2-")  # whose vCPUs share one quota


def quotas(config: RunConfig) -> dict[str, int]:
    """The limit that each quota needs in gcp.location: the most that one job takes, as jobs run one after another, also
    those of several stages.

    GPUs and CPUs with an unknown quota are left out.
    """
    needed: Counter[str] = Counter()
    uri = join_uri(config.bucket_root_uri, "runs", config.name)
    runs = config.stage_runs().values()
    for run, job in ((stage, job) for stage in runs for job in jobs_of(stage)):
        here = (
            capacity_option
            for capacity_option in capacity_options(run, job)
            if capacity_option.gcp.location == config.gcp.location
        )
        for option in here:
            spec = job_spec(option, job, uri)
            of_run: Counter[str] = Counter()
            kind = "preemptible_" if spec["scheduling"].get("strategy") in PREEMPTIBLE else ""
            for pool in filter(None, spec["worker_pool_specs"]):
                for name, count in _of_machine(pool["machine_spec"]).items():
                    of_run[f"custom_model_training_{kind}{name}"] += count * pool["replica_count"]
            needed |= of_run  # the larger count of each
    return dict(needed)


def serving_quotas(config: RunConfig) -> dict[str, int]:
    """The limit that each quota of serving needs in gcp.location: the replicas of section deploy, at most.

    Those of Cloud Run's GPUs, whose names no document states, are left out.
    """
    deploy = config.deploy
    if deploy is None or deploy.cloud_run or not deploy.image_uri:
        return {}
    machine: MachineSpec = {"machine_type": deploy.machine_type}
    if deploy.accelerator_count:
        machine["accelerator_type"] = deploy.accelerator_type
        machine["accelerator_count"] = deploy.accelerator_count
    of_machine = _of_machine(machine)
    return {f"custom_model_serving_{name}": count * deploy.max_replicas for name, count in of_machine.items()}


def _of_machine(machine: MachineSpec) -> dict[str, int]:
    """Quotas of one machine, by the end of the quota's name."""
    needed: dict[str, int] = {}
    gpu = GPU_NAMES.get(machine.get("accelerator_type", ""))
    if gpu:
        needed[f"nvidia_{gpu}_gpus"] = machine["accelerator_count"]
    name = machine["machine_type"]
    known = load_catalog().machines.get(name)
    if known and name.startswith(CPU_FAMILIES):
        needed["cpus"] = known.vcpus
    return needed
