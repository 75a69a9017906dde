"""`vlmpipe plan`: whether a run is valid and fits in memory, how long it takes, what it costs, and what would pay."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, get_args

from vlmpipe.catalog import nccl
from vlmpipe.catalog.machines import Catalog, Device, Gpu, Machine, load_catalog
from vlmpipe.catalog.prices import Prices, load_prices
from vlmpipe.catalog.this_machine import LocalMachine
from vlmpipe.config.rules.warnings import shape_warnings
from vlmpipe.config.run_config import RunConfig, warnings
from vlmpipe.job_spec.build import Job, job_spec, jobs_of
from vlmpipe.job_spec.check import job_violations, unknown_gpu_code
from vlmpipe.job_spec.violation import Violation
from vlmpipe.planner.cost import estimate as cost
from vlmpipe.planner.cost.bill import Bill, bill_of
from vlmpipe.planner.cost.estimate import Cost
from vlmpipe.planner.jobs.gate_bounds import bound_doubts
from vlmpipe.planner.jobs.hours import start_note
from vlmpipe.planner.jobs.memory import JobMemory, memory_beside_training
from vlmpipe.planner.jobs.nodes import Nodes, nodes_of, on_this_machine, too_few_gpus
from vlmpipe.planner.jobs.pools import launchers_json, pool_json
from vlmpipe.planner.jobs.replay import replay_notes
from vlmpipe.planner.memory.estimate import estimate_memory
from vlmpipe.planner.memory.rank import GIB, LITTLE_SPARE, NEAR, Memory
from vlmpipe.planner.memory.zero_config import unpriced
from vlmpipe.planner.model_architecture import Architecture, architecture
from vlmpipe.planner.parallel_layout import layout_of
from vlmpipe.planner.prepared_workload import planned_workload, questions_note
from vlmpipe.planner.scenario import Scenario
from vlmpipe.planner.sequence_fill import length_advice
from vlmpipe.planner.serving import unservable
from vlmpipe.planner.steps.estimate import WHOLE, PipelinePlan, Stage, plan_steps
from vlmpipe.planner.time import feature_cache, reduction_server
from vlmpipe.planner.time.external_trainer import external_time
from vlmpipe.planner.time.feature_cache import CacheAdvice
from vlmpipe.planner.time.reduction_server import Advice
from vlmpipe.planner.time.step_time import Time, estimate_time
from vlmpipe.planner.time.time_limit import time_limit_note, validation_notes
from vlmpipe.planner.workload import Workload, is_cached
from vlmpipe.records.plan_json import PoolJson
from vlmpipe.trainer.config.compiling import CompileChoice
from vlmpipe.trainer.config.job import RunPaths
from vlmpipe.trainer.errors import ExitCode, UserError
from vlmpipe.trainer.hooks.rules import rules_of

MIN_MFU = 0.05  # below it most of what is paid for waits: published runs reach 0.2 to 0.6
MAX_LOST_SHARE = 0.10  # of the time of training, to interruptions and checkpoints
State = Literal["green", "amber", "red"]
STATES: tuple[State, ...] = get_args(State)  # the best one first


@dataclass(frozen=True)
class Plan:
    """The whole plan. None: not known, and a note says why."""

    name: str
    findings: tuple[Violation, ...]
    jobs: dict[str, list[PoolJson]]
    model: Architecture | None = None
    load: Workload | None = None
    memory: Memory | None = None
    beside_training: tuple[JobMemory, ...] = ()  # memory of the other jobs, and of `vlmpipe predict`
    time: Time | None = None
    compiling: CompileChoice | None = None
    unsupported: tuple[str, ...] = ()  # what the GPU cannot do, or the prepared data
    features_cache: CacheAdvice | None = None
    reduction_server: Advice | None = None
    cost: Cost | None = None
    bill: Bill | None = None
    pipeline: PipelinePlan | None = None  # None: the run has no machines of its own
    notes: tuple[str, ...] = ()
    trainer: str = ""  # name of train.trainer
    nccl_plugin: str = ""  # that NCCL is expected to use between the nodes of training; empty for none
    here: LocalMachine | None = None  # of a local run, which has no job specs, no steps with machines and no cost

    @property
    def stages(self) -> dict[str, Plan]:
        """The plan of each stage: this one, under an empty name."""
        return {"": self}

    @property
    def errors(self) -> list[str]:
        """Why the run would fail, a line each."""
        return [
            *(finding.text() for finding in self.findings if finding.severity == "error"),
            *self.estimate_errors,
        ]

    @property
    def estimate_errors(self) -> list[str]:
        """Return the estimate's errors: unsupported GPU or warm-up, memory, disks, capacity terms that are not sold."""
        errors = [*self.unsupported, *(self.pipeline.errors if self.pipeline else ())]
        for host in (self.memory.host, self.memory.start) if self.memory else ():
            if host and not host.fits:
                errors.append(
                    f"does not fit: a {host.machine} has {host.capacity_bytes / GIB:,.1f} GiB of memory for it, and "
                    f"{', '.join(part.name for part in host.parts)} take {host.total_bytes / GIB:,.1f} GiB"
                )
        if self.memory and self.memory.spare_bytes < 0 and not self.memory.is_near:
            need, there = self.memory.total_bytes / GIB, self.memory.capacity_bytes / GIB
            errors.append(
                f"does not fit: {need:,.1f} GiB on {self.memory.device} with {there:,.1f} GiB; "
                f"the largest part is {self.memory.binding}"
            )
        errors += [error for job in self.beside_training for error in job.errors()]
        if self.time and self.time.mfu is not None and self.time.mfu < MIN_MFU and self.time.step_s:
            largest = next(part for part in self.time.parts if part.name == self.time.binds)
            errors.append(
                f"MFU is {self.time.mfu:.1%}, below {MIN_MFU:.0%}: {largest.name} takes "
                f"{largest.s / self.time.step_s:.0%} of a step; use fewer or smaller GPUs, larger micro-batches, or a "
                "strategy that sends less (vlmpipe plan --suggest)"
            )
        if self.cost and self.cost.never_ends:
            every_min = self.cost.interrupted_every_s / 60
            errors.append(
                f"the run never ends on {self.cost.term}: at one interruption in {every_min:,.0f} "
                "min it loses more than it computes; save more often, use fewer nodes, another scheduling strategy, or "
                "correct plan.preemptions_per_node_hour"
            )
        for term in self.cost.capacity_fallback if self.cost else ():
            if why := self.cost and self.cost.by_term[term].why_not:
                errors.append(f"cluster.capacity_fallback: {term} is not possible: {why}")
        for name, elsewhere in self.cost.elsewhere.items() if self.cost else ():
            if elsewhere.why_not:
                errors.append(f"cluster.capacity_fallback: {name} is not possible: {elsewhere.why_not}")
        return errors

    @property
    def doubts(self) -> list[str]:
        """Why a plan without errors is amber, a phrase each."""
        codes = dict.fromkeys(finding.code for finding in self.findings)
        doubts = [f"see {', '.join(codes)}"] if codes else []
        if self.trainer:
            doubts.append(f"memory of {self.trainer}, a trainer that this plan does not know, is not planned")
            return [*doubts, *([] if self.time and self.time.train_hours else ["time and cost are unknown"])]
        if self.memory is None:
            return [*doubts, "memory, time and cost are unknown"]
        if self.memory.is_near:
            share = -self.memory.spare_bytes / self.memory.capacity_bytes
            doubts.append(
                f"it takes {share:.1%} more memory than there is, within the error of the estimate, {NEAR:.0%}"
            )
        elif 0 <= self.memory.spare_bytes < LITTLE_SPARE * self.memory.capacity_bytes:
            doubts.append(f"only {self.memory.spare_bytes / GIB:,.1f} GiB of memory to spare")
        doubts += [doubt for job in self.beside_training for doubt in job.doubts()]
        if self.memory.returns_memory:
            doubts.append(
                f"torch's allocator keeps {self.memory.idle_bytes / GIB:,.1f} GiB that is not in use at the peak, "
                "which does not fit next to the rest: it gives memory back and allocates it again in each step, slowly"
            )
        doubts += self.cost.doubts(MAX_LOST_SHARE) if self.cost else []
        if self.cost is not None and self.cost.usd is None:  # no cost is planned for the local target
            if self.time is None or self.time.step_s is None:
                doubts.append("time and cost are unknown")
            else:
                doubts.append("a price is unknown" if self.time.steps else "the amount of data is unknown")
        return doubts

    @property
    def state(self) -> State:
        """red: it would fail. amber: look before you start it. green: no objections."""
        return "red" if self.errors else "amber" if self.doubts else "green"

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        shape = self.model.shape if self.model else None
        return {
            "name": self.name,
            "state": self.state,
            "errors": self.errors,
            "doubts": self.doubts,
            "findings": [finding.as_dict() for finding in self.findings],
            "model": {
                "parameters": shape.total_parameters,
                "trainable_parameters": shape.trainable_parameters,
                "parts": dict(shape.parameters),
                "frozen": sorted(shape.frozen),
                "origin": self.model.origin,
            }
            if self.model and shape
            else None,
            "load": _as_dict(self.load),
            "jobs": self.jobs,
            "memory": self.memory.as_dict() if self.memory else None,
            "memory_beside_training": [job.as_dict() for job in self.beside_training],
            "time": _as_dict(self.time),
            "compile": _as_dict(self.compiling),
            "features_cache": _as_dict(self.features_cache),
            "reduction_server": _as_dict(self.reduction_server),
            "cost": _without_pipelines(_as_dict(self.cost)),
            "bill": self.bill.as_dict() if self.bill else None,
            "pipeline": self.pipeline.as_dict() if self.pipeline else None,
            "trainer": self.trainer,
            "nccl_plugin": self.nccl_plugin,
            "this_machine": self.here.as_dict() if self.here else None,
            "notes": list(self.notes),
        }


def plan_run(config: RunConfig, *, here: LocalMachine | None = None, stage: Stage = WHOLE) -> Plan:
    """Plan a run of one training. Reads no data but the index of prepared data, and downloads no weights.

    `here`: the machine of a local run, which has no cost and no steps with machines of their own.
    """
    paths = RunPaths(run_id=config.name, root_uri=config.output.root_uri)
    jobs: dict[str, list[PoolJson]] = {}
    findings: list[Violation] = []
    notes = [str(problem) for problem in warnings(config)]
    if here:
        jobs = {job: [launchers_json(config, job)] for job in jobs_of(config)}
        config = on_this_machine(config, here)
    else:
        for job in jobs_of(config):
            pools = job_spec(config, job, paths.run_uri)["worker_pool_specs"]
            jobs[job] = [pool_json(number, pool) for number, pool in enumerate(pools)]
            findings += [
                job_violation
                for job_violation in job_violations(config, job, paths.run_uri)
                if job_violation not in findings
            ]
        notes += dict.fromkeys(filter(None, (unknown_gpu_code(config, job) for job in jobs_of(config))))
    if ignored := unpriced(config.train.deepspeed):
        notes.append(f"No figure of this plan considers these of train.deepspeed: {', '.join(ignored)}.")
    if config.register_.registry.startswith("vertex://"):
        serving = "." if config.deploy else "; serving it is not in this plan."
        notes.append(f"An accepted model becomes a version in Vertex AI Model Registry{serving}")
    catalog = load_catalog()
    nodes = nodes_of(config, "train", here)
    if not here:
        nodes = dataclasses.replace(nodes, machine=described_machine(config, catalog))
    trainer = config.train.trainer.name if config.train.trainer else ""
    bare = Plan(
        config.name,
        tuple(findings),
        jobs,
        notes=tuple(notes),
        trainer=trainer,
        here=here,
        unsupported=_unsupported(config, nodes.device),
    )
    if not here:
        unknown: dict[Job, float | None] = dict.fromkeys(jobs_of(config))
        hours = stage.hours_of(unknown | ({} if is_cached(config) else {"cache_features": 0.0}))
        pipeline = plan_steps(config, stage, shape=None, samples=None, job_hours=hours)
        bare = dataclasses.replace(bare, pipeline=pipeline)
    try:
        model = architecture(config)
    except UserError as error:
        if error.code == ExitCode.CONFIG:  # nothing that this machine lacks
            raise
        note = f"Memory, time and cost are open: the model's sizes are not known. {error.text()}"
        return _with_doubts(dataclasses.replace(bare, notes=(*notes, note)), config)
    if nodes.machine is None:
        note = f"Memory, time and cost are open: nothing is known of the machine {config.cluster.machine_type}; "
        note += "give plan.machine.nic_gbps and plan.machine.memory_gib."
        return _with_doubts(dataclasses.replace(bare, model=model, notes=(*notes, note)), config)
    if not here:
        bare = dataclasses.replace(bare, nccl_plugin=nccl.expected(config, nodes.machine))
    return _with_doubts(_estimated(bare, config, model, nodes, paths, stage), config)


def _with_doubts(plan: Plan, config: RunConfig) -> Plan:
    """The plan with the doubts about bounds of the gate: impossible ones are errors."""
    doubts = bound_doubts(config, plan.load)
    notes = [f"{doubt.text}." for doubt in doubts if not doubt.is_certain]
    errors = [doubt.text for doubt in doubts if doubt.is_certain]
    return dataclasses.replace(plan, notes=(*plan.notes, *notes), unsupported=(*plan.unsupported, *errors))


def described_machine(config: RunConfig, catalog: Catalog) -> Machine | None:
    """The machine of the catalogue with what the run file says of it (plan.machine); None for one of which neither
    knows network and memory."""
    known, described = catalog.machines.get(config.cluster.machine_type), config.plan.machine
    if known:
        return dataclasses.replace(
            known, nic_gbps=described.nic_gbps or known.nic_gbps, memory_gib=described.memory_gib or known.memory_gib
        )
    if described.nic_gbps is None or described.memory_gib is None:
        return None
    return Machine(
        machine_type=config.cluster.machine_type,
        vcpus=1,
        memory_gib=described.memory_gib,
        nic_gbps=described.nic_gbps,
        boot_disk_types=(),
        source="the run file",
        date="",
    )


def plan_basis(config: RunConfig) -> tuple[Architecture, Workload, Prices]:
    """Inputs of every estimate: the model's sizes, the workload and prices. Raises UserError."""
    model = architecture(config)
    paths = RunPaths(run_id=config.name, root_uri=config.output.root_uri)
    return model, planned_workload(config, model, paths)[0], load_prices(config.plan.prices_file)


def _estimated(bare: Plan, config: RunConfig, model: Architecture, nodes: Nodes, paths: RunPaths, stage: Stage) -> Plan:
    trainer, here, machine, device = config.train.trainer, bare.here, nodes.machine, nodes.device
    assert machine
    gpu = device if isinstance(device, Gpu) else None
    if trainer:
        config = config.model_copy(update={"features": config.features.model_copy(update={"cache": "off"})})
    layout = layout_of(config)
    prices = None if here else load_prices(config.plan.prices_file)
    load, note = planned_workload(config, model, paths)
    shape = load.sized(model.shape)
    cache = feature_cache.advise(config, shape, layout, load, gpu, prices)
    case = Scenario(config, shape, layout, load, machine, gpu, cached=cache.state == "on")
    time = external_time(config) if trainer else estimate_time(case)
    notes = [*bare.notes, *([note] if note else [])]
    for rules in rules_of(config):
        notes += rules.plan_notes(config, shape.trainable_parameters)
    notes += map(str, shape_warnings(config, shape))
    warmup = load.warmup_problem(config.train)
    notes += filter(None, (time_limit_note(config, time.train_hours), "" if load.is_prepared else warmup))
    notes += validation_notes(config, time.steps)
    notes += filter(None, [start_note(case, is_later_stage=not stage.is_first)])
    notes += replay_notes(case, prices)
    if config.data.share_prefix != "off":
        notes.append(questions_note(config, model, load))
    if not trainer and (advice := length_advice(load.fills, config)):
        notes.append(advice)
    for what in (machine, gpu):
        if what is not None and what.unconfirmed and not here:
            named = getattr(what, "machine_type", None) or getattr(what, "accelerator_type", "")
            notes.append(f"{named}: {', '.join(what.unconfirmed)} of the catalogue are not confirmed by a document.")
    estimated = cost.estimate_cost(case, time, cache, prices, stage) if prices else None
    is_run = {"cache_features": cache.state != "off", "replay": load.replayed is None}
    not_run = [job for job, runs in is_run.items() if not runs]
    return dataclasses.replace(
        bare,
        jobs={job: pools for job, pools in bare.jobs.items() if job not in not_run},
        model=model,
        load=load,
        memory=None if trainer else estimate_memory(config, model, machine, device, load=load),
        beside_training=memory_beside_training(config, shape, load, encodes=cache.state == "on", here=here),
        time=time,
        compiling=None if trainer else case.compiling,
        unsupported=(
            *bare.unsupported,
            *filter(None, [too_few_gpus(config, here) if here else "", warmup if load.is_prepared else ""]),
            *unservable(config, model),
        ),
        features_cache=None if trainer else cache,
        reduction_server=reduction_server.advise(config, layout, time, machine, prices)
        if prices and not trainer
        else None,
        cost=estimated,
        bill=bill_of(case, estimated, prices, is_last=stage.is_last) if estimated and prices else None,
        pipeline=estimated.by_term[estimated.term].pipeline if estimated else None,
        notes=tuple(dict.fromkeys(notes)),
    )


def _unsupported(config: RunConfig, gpu: Device | None) -> tuple[str, ...]:
    """Settings that the GPU does not support, with the nearest that works."""
    if gpu is None or gpu.has_float8 or config.train.float8 == "none":
        return ()
    able = ", ".join(other.accelerator_type for other in load_catalog().gpus.values() if other.has_float8)
    return (
        f"train.float8 {config.train.float8} does not work on {gpu.label}, of compute capability "
        f"{gpu.compute_capability}: use one of {able}, or train.float8=none",
    )


def _without_pipelines(cost: dict[str, Any] | None) -> dict[str, object] | None:
    """The steps are in the plan once: those of other terms differ by the price of the jobs' starts only."""
    for estimate in [*cost["by_term"].values(), *cost["elsewhere"].values()] if cost else ():
        del estimate["pipeline"]
    return cost


def _as_dict(value: Any) -> dict[str, object] | None:
    return None if value is None else dataclasses.asdict(value)
