"""The plan of a pipeline's steps on Vertex AI: whether disks and memory suffice, time and cost beside the jobs'."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vlmpipe.catalog.machines import load_catalog
from vlmpipe.catalog.steps import ImageName, StepFacts, load_steps
from vlmpipe.config.run_config import RunConfig
from vlmpipe.config.sections.sweep import SweepConfig
from vlmpipe.job_spec.build import Job
from vlmpipe.planner.steps.graph import TRAIN_VARIANTS, GraphStep, graph_steps
from vlmpipe.planner.steps.needs import GB, Need, StepNeeds
from vlmpipe.trainer.sizing.model_shape import ModelShape

if TYPE_CHECKING:
    from vlmpipe.catalog.prices import Prices

HOURS_PER_MONTH = 730  # Google Cloud's month
USED_SHARE = 0.9  # of what is free on a disk that is chosen here
DISK_STEP_GB = 100
DECODING = ("choose-replay", "plan-data", "prepare-chunks", "prepare-data")  # steps that hold images in memory
ASSUMED = (
    "Steps of the pipeline: how long machines take to start, to pull images and to read weights, most of the steps' "
    "work, and the size of image files are assumed (vlmpipe/catalog/steps.yaml); starts are taken as billed, and so is "
    "an e2-standard-4 for as long as a step watches a job."
)


@dataclass(frozen=True)
class PlannedStep:
    """One step, or the machines of the job that a step starts. None: not known."""

    name: str
    is_job: bool
    machine: str
    tasks: int  # machines side by side
    jobs: int  # of all machines of a job, how many jobs they are
    image: ImageName
    disk_gb: int
    disk_free_bytes: int  # beside the system and the image
    disk_needed_bytes: int | None
    memory_bytes: int | None  # of the machine, that the step may use; None of jobs, whose memory the plan has apart
    memory_needed_bytes: int | None
    start_s: float  # of a job until it has read its weights
    work_s: float | None  # 0 of a step that watches a job: it takes as long as the job
    watches_s: float | None
    usd: float | None = None
    why: str = ""  # what most of the disk is for
    disk_field: str = ""  # of the run file

    @property
    def errors(self) -> Iterator[str]:
        """Why the step would fail, with what to set."""
        what = f"{'job' if self.is_job else 'step'} {self.name}"
        if self.disk_needed_bytes is not None and self.disk_needed_bytes > self.disk_free_bytes:
            yield (
                f"{what}: its boot disk of {self.disk_gb} GB has {self.disk_free_bytes / GB:,.0f} GB besides the "
                f"system and the image, and {self.why} take {self.disk_needed_bytes / GB:,.0f} GB; "
                f"set {self.disk_field}="
                f"{disk_for(self.disk_needed_bytes, self.image)}"
            )
        need, there = self.memory_needed_bytes, self.memory_bytes
        if need is not None and there is not None and need > there:
            lower = "lower data.max_image_bytes" if self.name in DECODING else "no setting gives it more"
            yield (
                f"{what}: a machine of type {self.machine} has {there / GB:,.1f} GB of memory for it, and it takes "
                f"{need / GB:,.1f} GB; {lower}"
            )


@dataclass(frozen=True)
class PipelinePlan:
    """All steps of a stage that a new run runs."""

    steps: tuple[PlannedStep, ...]
    missing: tuple[str, ...] = ()  # prices that are not known

    @property
    def errors(self) -> list[str]:
        return [error for step in self.steps for error in step.errors]

    @property
    def machines(self) -> int:
        """Machines of the pipeline's own steps, of which each starts and pulls an image."""
        return sum(step.tasks for step in self.steps if not step.is_job)

    @property
    def hours(self) -> float:
        """Starts, and work of the pipeline's own steps, one after the other; the jobs' own hours are not in it."""
        return sum(step.start_s + (step.work_s or 0.0) for step in self.steps) / 3600

    @property
    def usd(self) -> float | None:
        """Cost of the pipeline's own steps and of the jobs' starts; None where no price is known."""
        known = [step.usd for step in self.steps if step.usd is not None]
        return sum(known) if known else None

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {
            "machines": self.machines,
            "hours": self.hours,
            "usd": self.usd,
            "errors": self.errors,
            "steps": [dataclasses.asdict(step) for step in self.steps],
            "missing": list(self.missing),
            "assumptions": [ASSUMED],
        }


@dataclass(frozen=True)
class Stage:
    """The place of a training in its run: whether it is the first or the last one, the sweep that it is in place of one
    training, and its number of jobs; and the disks of a pipeline that is compiled already, by step."""

    is_first: bool = True
    is_last: bool = True
    sweep: SweepConfig | None = None
    sweep_jobs: int = 1
    disks: Mapping[str, int] | None = None

    def hours_of(self, jobs: Mapping[Job, float | None]) -> dict[Job, float | None]:
        """How long each job takes that the steps watch: a sweep's job does several trainings, and evaluates each."""
        if self.sweep is None:
            return dict(jobs)
        train_hours, evaluation = jobs["train"], jobs["evaluate"]
        trainings = self.sweep.trainings_per_job
        whole = None if train_hours is None or evaluation is None else trainings * (train_hours + evaluation)
        return {**jobs, "train": whole}


WHOLE = Stage()


def plan_steps(
    config: RunConfig,
    stage: Stage,
    *,
    shape: ModelShape | None,
    samples: int | None,
    job_hours: Mapping[Job, float | None],
) -> PipelinePlan:
    """The steps without their prices.

    Args:
        samples: of all splits.
        job_hours: of each job. 0: it does not run. None: not known.
    """
    facts, needs = load_steps(), StepNeeds(config, shape, samples, dict(job_hours), is_later_stage=not stage.is_first)
    encodes = job_hours.get("cache_features") != 0.0
    disks = step_disks(config, shape=shape, samples=samples) if stage.disks is None else stage.disks
    rows = []
    graph = graph_steps(
        config, encodes=encodes, replays=job_hours.get("replay") != 0.0, is_last=stage.is_last, sweep=stage.sweep,
        sweep_jobs=stage.sweep_jobs,
    )  # fmt: skip
    for step in graph:
        if step.is_expected:
            rows.append(_own(step, needs.of(step.name), facts, disks, job_hours))
            if step.job:
                rows.append(_of_job(config, step, step.job, needs, facts))
    return PipelinePlan(tuple(rows))


def step_disks(config: RunConfig, *, shape: ModelShape | None, samples: int | None) -> dict[str, int]:
    """GB of the boot disks of the pipeline's own steps that need another than the default one, by step.

    cluster.step_disks decides where it names the step. What is not known gets the default disk.
    """
    needs, default = StepNeeds(config, shape, samples, {}), load_steps().boot_disk_size_gb
    configured = {str(name): size for name, size in config.cluster.step_disks.items()}
    disks = {}
    for step in graph_steps(config, encodes=True):
        needed = needs.of(step.name).disk_bytes
        disks[step.name] = configured.get(step.name) or (default if needed is None else disk_for(needed, step.image))
    return {name: size for name, size in disks.items() if size != default}


def disk_for(needed_bytes: int, image: ImageName) -> int:
    """GB of a boot disk, at least the default one, with room for the bytes beside the system and the image."""
    facts = load_steps()
    whole_gb = needed_bytes / GB / USED_SHARE + facts.boot_disk_size_gb - facts.free_gb(facts.boot_disk_size_gb, image)
    return max(facts.boot_disk_size_gb, DISK_STEP_GB * math.ceil(whole_gb / DISK_STEP_GB))


def priced(plan: PipelinePlan, prices: Prices, region: str, job_rates: Mapping[str, float | None]) -> PipelinePlan:
    """The plan with the cost of each step. `job_rates`: of all machines of each job, in US dollars an hour."""
    rows, missing = [], dict[str, None]()
    for step in plan.steps:
        if step.is_job:
            rate = job_rates.get("train" if step.name == TRAIN_VARIANTS else step.name)
            usd = None if rate is None else step.jobs * rate * step.start_s / 3600
        else:
            usd, unknown = _own_usd(step, prices, region)
            missing.update(dict.fromkeys(unknown))
        rows.append(dataclasses.replace(step, usd=usd))
    return PipelinePlan(tuple(rows), tuple(missing))


def _own_usd(step: PlannedStep, prices: Prices, region: str) -> tuple[float | None, tuple[str, ...]]:
    facts = load_steps()
    machine = prices.machine(step.machine, "", 0, region, "standard")
    disk = prices.boot_disk(facts.boot_disk_type, region)
    if machine.usd_per_hour is None:
        return None, (*machine.missing, *disk.missing)
    hourly = machine.usd_per_hour + step.disk_gb * (disk.usd_per_gb_month or 0.0) / HOURS_PER_MONTH
    hours = (step.start_s + (step.work_s or 0.0) + (step.watches_s or 0.0)) / 3600
    usd = step.tasks * hours * hourly
    if step.disk_gb != facts.boot_disk_size_gb:  # a job of its own, which another step starts and watches
        watcher = prices.machine(facts.default_machine, "", 0, region, "standard")
        usd += step.tasks * hours * (watcher.usd_per_hour or 0.0)
    return usd, disk.missing


def _own(
    step: GraphStep, need: Need, facts: StepFacts, disks: Mapping[str, int], job_hours: Mapping[Job, float | None]
) -> PlannedStep:
    machine = load_catalog().machines[facts.machine_of(step.name)]
    size = disks.get(step.name, facts.boot_disk_size_gb)
    hours = job_hours.get(step.job) if step.job else 0.0
    start_s = facts.start_s(step.image)
    if size != facts.boot_disk_size_gb:
        start_s += facts.start_s("launcher")
    return PlannedStep(
        name=step.name,
        is_job=False,
        machine=machine.machine_type,
        tasks=step.tasks,
        jobs=0,
        image=step.image,
        disk_gb=size,
        disk_free_bytes=int(facts.free_gb(size, step.image) * GB),
        disk_needed_bytes=need.disk_bytes,
        memory_bytes=int(facts.memory_share * machine.memory_gib * 2**30),
        memory_needed_bytes=need.memory_bytes,
        start_s=start_s,
        work_s=need.work_s,
        watches_s=None if hours is None else 3600 * hours,
        why=need.why or "its files",
        disk_field=f"cluster.step_disks.{step.name}",
    )


def _of_job(config: RunConfig, step: GraphStep, job: Job, needs: StepNeeds, facts: StepFacts) -> PlannedStep:
    cluster = config.cluster.of_job(job)
    disk_bytes, why = needs.of_job(job)
    weights_s = needs.weights_bytes(job) / (facts.rates["weights_gb_per_s"] * GB)
    return PlannedStep(
        name=step.name,
        is_job=True,
        machine=cluster.machine_type,
        tasks=cluster.replica_count * step.tasks,
        jobs=step.tasks,
        image="trainer",
        disk_gb=cluster.boot_disk_size_gb,
        disk_free_bytes=int(facts.free_gb(cluster.boot_disk_size_gb, "trainer") * GB),
        disk_needed_bytes=disk_bytes,
        memory_bytes=None,
        memory_needed_bytes=None,
        start_s=facts.start_s("trainer", has_gpus=bool(cluster.accelerator_count)) + weights_s,
        work_s=0.0,
        watches_s=0.0,
        why=why,
        disk_field=f"cluster.{_machine_field(config, job)}boot_disk_size_gb",
    )


def _machine_field(config: RunConfig, job: Job) -> str:
    """Where the run file has the job's machine, below cluster."""
    if job == "cache_features" and config.cluster.features_machine:
        return "features_machine."
    asks = job in ("replay", "evaluate", "benchmark", "audit")
    return "evaluate_machine." if asks and config.cluster.evaluate_machine else ""
