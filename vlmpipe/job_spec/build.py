"""Builds the CustomJob specs of a run file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, get_args

from vlmpipe.access.needs import addresses_read
from vlmpipe.catalog.machines import load_catalog, reducers_needed
from vlmpipe.config.run_config import RunConfig
from vlmpipe.config.sections.cluster import CapacityOption, ClusterConfig, ReservationAffinityConfig
from vlmpipe.job_spec.forms import CustomJobSpec, MachineSpec, Node, Variable, WorkerPool
from vlmpipe.job_spec.order import NO_INPUTS, JobOrder
from vlmpipe.job_spec.worker_pools import STEP_LABEL, STOP_GRACE_VARIABLE
from vlmpipe.trainer.config.base import Section
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.preflight import bought
from vlmpipe.trainer.records.sweep import Sweep
from vlmpipe.trainer.storage.base import join_uri

Job = Literal["replay", "cache_features", "train", "evaluate", "benchmark", "audit"]
JOBS: tuple[Job, ...] = get_args(Job)
MODULES: dict[Job, str] = {
    "replay": "vlmpipe.trainer.evaluation.replay.answer",
    "cache_features": "vlmpipe.trainer.feature_cache.encode",
    "train": "vlmpipe.trainer.train",
    "evaluate": "vlmpipe.trainer.evaluation.evaluate",
    "benchmark": "vlmpipe.trainer.evaluation.lmms_eval",
    "audit": "vlmpipe.trainer.audit.job",
}
EXTERNAL_LAUNCHER = "vlmpipe.trainer.external.launch"
NO_IMAGE = "python"  # in place of the trainer image of local jobs without one
FLEX_START = "FLEX_START"


def jobs_of(config: RunConfig) -> tuple[Job, ...]:
    """The jobs of a run, in order."""
    left_out = {
        "benchmark": not config.evaluate.lmms_eval,
        "replay": config.data.replay is None,
        "audit": config.evaluate.audit is None,
    }
    return tuple(job for job in JOBS if not left_out.get(job))


def step_of(job: Job) -> str:
    """The step's name in the graph and in the run's folder."""
    return job.replace("_", "-")


def worker_pools(config: RunConfig, job: Job, run_uri: str) -> list[WorkerPool]:
    """The job's WorkerPoolSpecs, snake_case: the chief, the workers and, for training, the Reduction Server, or
    parameter servers and evaluators.

    A job reads its settings from `<run_uri>/run.json`. No pool is empty: Vertex AI's component drops empty pools, and
    those after them would take other roles.
    """
    cluster = config.cluster.of_job(job)
    node = _node(config, job, run_uri)
    pools: list[WorkerPool] = [{**node, "replica_count": 1}]
    if cluster.replica_count > 1:
        pools.append({**node, "replica_count": cluster.replica_count - 1})
    if config.train.trainer and job == "train":
        roles = config.train.trainer.roles  # worker pools 2 and 3; RunConfig has checked that none before is empty
        server = _node(config, job, run_uri, own_machine=roles.ps_machine_type)
        pools += [{**server, "replica_count": roles.ps}] if roles.ps else []
        pools += [{**node, "replica_count": roles.evaluator}] if roles.evaluator else []
    reducers = cluster.reduction_server
    if reducers:
        assert len(pools) == 2, "checked by RunConfig"  # its place is worker pool 2
        pools.append(
            {
                "machine_spec": {"machine_type": reducers.machine_type},
                "replica_count": reducer_count(cluster),
                "container_spec": {"image_uri": reducers.container_uri},
            }
        )
    return pools


def reducer_count(cluster: ClusterConfig) -> int:
    """Replicas of the Reduction Server, 0 without one.

    Raises ConfigError for `auto` on a machine of unknown bandwidth.
    """
    server = cluster.reduction_server
    if server is None:
        return 0
    if isinstance(server.replica_count, int):
        return server.replica_count
    machine = load_catalog().machines.get(cluster.machine_type)
    if machine is None:
        raise ConfigError(
            f"cluster.reduction_server.replica_count is auto, and nothing is known of {cluster.machine_type}",
            expected="a machine of the catalogue, whose network's bandwidth gives the number of reducers",
            fix="set the number of reducers, or correct cluster.machine_type",
        )
    return reducers_needed(cluster.replica_count, machine.nic_gbps)


def job_settings(config: RunConfig, job: Job) -> JobOrder:
    """The order of a job without its worker pools and its output folder, which are the run's."""
    cluster, gcp = capacity_options(config, job)[0].cluster, config.gcp
    strategy = cluster.scheduling_strategy.upper()
    return JobOrder(
        display_name=f"{config.name}-{step_of(job)}",
        project=gcp.project,
        location=gcp.location if gcp.project else "",
        timeout=cluster.timeout,
        strategy=strategy,
        max_wait_duration=cluster.max_wait_duration if strategy == FLEX_START else "",
        restart_job_on_worker_restart=cluster.restart_job_on_worker_restart,
        service_account=gcp.job_service_account or gcp.service_account,
        network=gcp.network,
        reserved_ip_ranges=list(gcp.reserved_ip_ranges),
        psc_interface_config=_set_fields(gcp.psc_interface_config),
        tensorboard=gcp.tensorboard if job == "train" else "",
        enable_web_access=gcp.enable_web_access,
        encryption_spec_key_name=gcp.encryption_spec_key_name,
        persistent_resource_id=gcp.persistent_resource_id,
        labels={**gcp.labels, STEP_LABEL: step_of(job)},
        disable_retries=config.cluster.disable_retries,
        enable_dashboard_access=gcp.enable_dashboard_access,
    )


def capacity_options(config: RunConfig, job: Job) -> list[RunConfig]:
    """The run file with each option of cluster.capacity_fallback in place; as it is for jobs without fallback."""
    cluster = config.cluster
    if not cluster.capacity_fallback or job != "train":
        return [config]
    return [in_region(_with_option(config, option), option.location) for option in cluster.capacity_fallback]


def _with_option(config: RunConfig, option: CapacityOption) -> RunConfig:
    cluster = config.cluster
    changes = {
        "scheduling_strategy": option.scheduling_strategy,
        "max_wait_duration": option.wait,
        "capacity_fallback": (),
        "reservation_affinity": cluster.reservation_affinity if option.reservation else None,
    }
    return config.model_copy(update={"cluster": cluster.model_copy(update=changes)})


def in_region(config: RunConfig, location: str) -> RunConfig:
    """The run file with its jobs in another region, where the run's TensorBoard is not; as it is for an empty one."""
    if not location:
        return config
    return config.model_copy(update={"gcp": config.gcp.model_copy(update={"location": location, "tensorboard": ""})})


def job_order(config: RunConfig, job: Job, run_uri: str) -> JobOrder:
    """The order of a job of the run in this folder."""
    pools = worker_pools(config, job, run_uri)
    return replace(job_settings(config, job), worker_pool_specs=pools, base_output_directory=run_uri)


def job_spec(config: RunConfig, job: Job, run_uri: str) -> CustomJobSpec:
    """The job's CustomJobSpec as its step sends it."""
    return job_order(config, job, run_uri).spec()


def trials_order(config: RunConfig, run_uri: str, module: str, arguments: Sequence[str]) -> JobOrder:
    """The order of a training job whose nodes run `module`, which starts the trainer itself, with these arguments."""
    order = job_order(config, "train", run_uri)
    processes = ["--nproc-per-node", str(config.cluster.processes)]
    for pool in order.worker_pool_specs[:2]:
        command = ["python", "-m", module]
        pool["container_spec"] = {**pool["container_spec"], "command": command, "args": [*arguments, *processes]}
    return order


def sweep_order(config: RunConfig, run_uri: str, number: int) -> JobOrder:
    """The order of a sweep's job, whose trainings the sweep in `run_uri` lists."""
    arguments = ["--config", join_uri(run_uri, Sweep.FILE), "--job", str(number)]
    return trials_order(config, run_uri, "vlmpipe.trainer.trials.sweep", arguments)


def needs_own_step(config: RunConfig, job: Job) -> bool:
    """Return whether a job on Vertex AI needs our own step in place of CustomTrainingJobOp.

    Google's launcher has no fallback and no input for some fields, and does not know that a job can end as EXPIRED:
    with flex_start it would ask for ever for a job whose wait for machines is over (job_remote_runner.py of
    google-cloud-pipeline-components 2.22).
    """
    falls_back = job == "train" and bool(config.cluster.capacity_fallback)
    order = job_settings(config, job)
    return falls_back or any(vars(order)[name] for name in NO_INPUTS) or order.strategy == FLEX_START


def _node(config: RunConfig, job: Job, run_uri: str, *, own_machine: str = "") -> Node:
    """A pool without its number of replicas. own_machine: its machine type, without GPUs; empty takes the job's."""
    cluster = config.cluster.of_job(job)
    machine_spec: MachineSpec = {"machine_type": own_machine or cluster.machine_type}
    if cluster.accelerator_count and not own_machine:
        machine_spec["accelerator_type"] = cluster.accelerator_type
        machine_spec["accelerator_count"] = cluster.accelerator_count
    if not own_machine and (affinity := _affinity(cluster, job)):
        machine_spec["reservation_affinity"] = affinity
    env = dict(cluster.env)
    if cluster.accelerator_count and not own_machine:
        env[bought.VARIABLE] = _bought_machine(config, job).model_dump_json(exclude_defaults=True)
    if job == "train" and config.train.wandb.project:
        env.setdefault("WANDB_PROJECT", config.train.wandb.project)  # so that rules and readers of the spec see it
    if (trainer := config.train.trainer) and job == "train":  # to stop the program, and then to save what it left
        env[STOP_GRACE_VARIABLE] = str(2 * trainer.stop_grace_s)
    image_uri, command, args = _task(config, job, join_uri(run_uri, "run.json"))
    variables: list[Variable] = [{"name": name, "value": value} for name, value in env.items()]
    node: Node = {"machine_spec": machine_spec}
    if trainer and job == "train" and trainer.kind == "package":
        node["python_package_spec"] = {
            "executor_image_uri": trainer.executor_image_uri,
            "package_uris": list(trainer.package_uris),
            "python_module": command[-1],
            "args": args,
        }
        if variables:
            node["python_package_spec"]["env"] = variables
    else:
        node["container_spec"] = {"image_uri": image_uri, "command": command, "args": args}
        if variables:
            node["container_spec"]["env"] = variables
    if cluster.nfs_mounts:
        node["nfs_mounts"] = [_set_fields(mount) for mount in cluster.nfs_mounts]
    if cluster.lustre_mounts:
        node["lustre_mounts"] = [_set_fields(mount) for mount in cluster.lustre_mounts]
    node["disk_spec"] = {"boot_disk_type": cluster.boot_disk_type, "boot_disk_size_gb": cluster.boot_disk_size_gb}
    return node


def _bought_machine(config: RunConfig, job: Job) -> bought.BoughtMachine:
    """Machine that the launcher compares with its node; memory and kind of a GPU that the catalogue does not know are
    not.
    """
    cluster = config.cluster.of_job(job)
    gpu = load_catalog().gpus.get(cluster.accelerator_type)
    known = (
        {
            "device": gpu.device,
            "gpu_memory_gib": round(gpu.memory_gib, 2),
            "compute_capability": gpu.compute_capability,
        }
        if gpu
        else {}
    )
    return bought.BoughtMachine(
        step=step_of(job),
        machine_type=cluster.machine_type,
        accelerator_type=cluster.accelerator_type,
        accelerator_count=cluster.accelerator_count,
        float8=job == "train" and config.train.float8 != "none",
        boot_disk_size_gb=cluster.boot_disk_size_gb,
        reducers=reducer_count(cluster),
        reads=addresses_read(config, "trainer"),
        any_program=job == "train" and config.train.trainer is not None and config.train.trainer.launch != "torchrun",
        check=cluster.machine_check,
        **known,
    )


def _affinity(cluster: ClusterConfig, job: Job) -> dict[str, object]:
    """ReservationAffinity of the job's nodes; with capacity fallback none for jobs beside training that are on Spot."""
    affinity: ReservationAffinityConfig | None = cluster.reservation_affinity
    if not affinity or (cluster.capacity_fallback and job != "train" and cluster.scheduling_strategy != "standard"):
        return {}
    kind = {"reservation_affinity_type": affinity.reservation_affinity_type.upper()}
    return kind | ({"key": affinity.key, "values": list(affinity.values)} if affinity.values else {})


def _set_fields(section: Section | None) -> dict[str, object]:
    return section.model_dump(mode="json", exclude_defaults=True) if section else {}


def _task(config: RunConfig, job: Job, run_json: str) -> tuple[str, list[str], list[str]]:
    """Image, command and arguments of the job's containers."""
    cluster, trainer = config.cluster.of_job(job), config.train.trainer
    processes, settings = ["--nproc-per-node", str(cluster.processes)], ["--config", run_json]
    image_uri, module = cluster.image_uri or NO_IMAGE, MODULES[job]
    if trainer and job == "train":
        return trainer.image_uri or image_uri, ["python", "-m", EXTERNAL_LAUNCHER], [*processes, *settings]
    if trainer and job == "evaluate" and trainer.evaluate_command:
        command = ["python", "-m", "vlmpipe.trainer.external.evaluate"]
        return trainer.image_uri or image_uri, command, settings
    if job == "benchmark":
        assert config.evaluate.lmms_eval
        return config.evaluate.lmms_eval.image_uri or NO_IMAGE, ["python", "-m", module], settings
    return image_uri, ["python", "-m", "vlmpipe.trainer.launch"], [*processes, "--", module, *settings]
