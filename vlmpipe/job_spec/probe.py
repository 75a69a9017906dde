"""The specs of probes: one replica of each machine of a run, for minutes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from vlmpipe.config.run_config import RunConfig
from vlmpipe.config.sections.cluster import ClusterConfig
from vlmpipe.job_spec.build import Job, capacity_options, job_order, job_spec, jobs_of, step_of
from vlmpipe.job_spec.forms import CustomJobSpec, Variable, WorkerPool
from vlmpipe.trainer.preflight.bought import VARIABLE, BoughtMachine
from vlmpipe.trainer.preflight.probe_plan import LIMIT_S, LOOK_S, STEP
from vlmpipe.trainer.storage.base import join_uri

MODULE = "vlmpipe.trainer.preflight.probe"
LAUNCHER = "vlmpipe.trainer.launch"


@dataclass(frozen=True)
class ProbedMachine:
    """A machine of a run with its image.

    Attributes:
        step: of the probe's record and of its label.
        config: the run file, or that of a stage; with capacity fallback that of the first option.
        job: gives the spec.
        steps: all that have such a machine, with the names of their stages.
        trained: names of the runs that train on it, by our own trainer.
    """

    step: str
    config: RunConfig
    job: Job
    steps: tuple[str, ...]
    trained: tuple[str, ...]

    @property
    def cluster(self) -> ClusterConfig:
        """The job's machine, a single one."""
        changes = {"replica_count": 1, "reduction_server": None, "evaluate_replica_count": 1, "evaluate_machine": None}
        return self.config.cluster.of_job(self.job).model_copy(update=changes)

    @property
    def named(self) -> str:
        """For people."""
        cluster = self.cluster
        gpus = f" with {cluster.accelerator_count} x {cluster.accelerator_type}" if cluster.accelerator_count else ""
        return f"{cluster.machine_type}{gpus}"


def probed_machines(config: RunConfig) -> list[ProbedMachine]:
    """The run's machines, training's first. Jobs with the same machine and image share a probe, also over stages."""
    machines: dict[tuple[object, ...], list[tuple[str, RunConfig, Job]]] = {}
    for stage, run in config.stage_runs().items():
        for job in sorted(jobs_of(run), key=lambda job: job != "train"):
            if job == "cache_features" and (run.features.cache == "off" or run.train.trainer):
                continue
            option = capacity_options(run, job)[0]
            name = f"{stage}-{step_of(job)}" if stage else step_of(job)
            machines.setdefault(_kind(job_spec(option, job, "")["worker_pool_specs"][0]), []).append(
                (name, option, job)
            )
    return [
        ProbedMachine(
            step=STEP if number == 1 else f"{STEP}-{number}",
            config=users[0][1],
            job=users[0][2],
            steps=tuple(name for name, _, _ in users),
            trained=tuple(run.name for _, run, job in users if job == "train" and not run.train.trainer),
        )
        for number, users in enumerate(machines.values(), start=1)
    ]


def _kind(pool: WorkerPool) -> tuple[object, ...]:
    """Machine, disk and image of a pool."""
    machine = {name: value for name, value in pool["machine_spec"].items() if name != "reservation_affinity"}
    task = pool.get("container_spec") or pool["python_package_spec"]
    image = task.get("image_uri") or task.get("executor_image_uri")
    return (*machine.items(), *pool["disk_spec"].items(), image)


def probe_spec(machine: ProbedMachine, run_uri: str) -> CustomJobSpec:
    """The probe's CustomJobSpec: the job's own, with one replica, its program and its time replaced."""
    order = job_order(machine.config, machine.job, run_uri)
    pool: WorkerPool = {**order.worker_pool_specs[0], "replica_count": 1}
    arguments = ["--nproc-per-node", str(_processes(machine)), "--", MODULE]
    arguments += ["--config", join_uri(run_uri, "run.json"), "--step", machine.step]
    if "container_spec" in pool:
        task = pool["container_spec"]
        pool["container_spec"] = {**task, "args": arguments, "command": ["python", "-m", LAUNCHER]}
        if "env" in task:
            pool["container_spec"]["env"] = _only_warned(task["env"], machine.step)
    else:
        package = pool["python_package_spec"]
        pool["python_package_spec"] = {**package, "args": arguments, "python_module": LAUNCHER}
        if "env" in package:
            pool["python_package_spec"]["env"] = _only_warned(package["env"], machine.step)
    of_probe = replace(
        order,
        worker_pool_specs=[pool],
        tensorboard="",
        timeout=f"{LIMIT_S}s",
        restart_job_on_worker_restart=False,
        disable_retries=True,
    )
    return of_probe.spec()


def _processes(machine: ProbedMachine) -> int:
    """Ranks of the all-reduce: one for each GPU. The image of another trainer may have no torch to start several."""
    return 1 if machine.config.train.trainer else machine.cluster.processes


def _only_warned(env: Sequence[Variable], step: str) -> list[Variable]:
    """Let a probe look at everything before a missing thing ends it."""
    changed: list[Variable] = []
    for variable in env:
        value = variable["value"]
        if variable["name"] == VARIABLE:
            bought = BoughtMachine.model_validate_json(value)
            update = {"check": "warn", "step": step, "look_timeout_s": LOOK_S}
            value = bought.model_copy(update=update).model_dump_json(exclude_defaults=True)
        changed.append({"name": variable["name"], "value": value})
    return changed
