"""Cost of a run, in total and by job, for each scheduling strategy, with expected losses by preemption.

Prices come from `prices.yaml` or the user's own file. A missing price is named: without that of training's machines the
cost is not known, without another it is a lower bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, get_args

from vlmpipe.catalog.price_schema import FLOATING_OLD_AFTER_DAYS, OLD_AFTER_DAYS, Term
from vlmpipe.config.run_config import RunConfig
from vlmpipe.config.sections.cluster import FLEX_START_MAX_TIMEOUT_S, ClusterConfig
from vlmpipe.job_spec.build import Job, in_region, reducer_count
from vlmpipe.planner.cost.cron import runs_per_month
from vlmpipe.planner.cost.requests import BucketRequests, bucket_requests
from vlmpipe.planner.jobs.hours import hours_beside_training
from vlmpipe.planner.scenario import Scenario
from vlmpipe.planner.steps.estimate import HOURS_PER_MONTH, WHOLE, PipelinePlan, Stage, plan_steps, priced
from vlmpipe.planner.steps.needs import all_samples
from vlmpipe.planner.time.communication import FP32_BYTES
from vlmpipe.planner.time.feature_cache import GIB, CacheAdvice
from vlmpipe.planner.time.goodput import GoodputLoss, goodput_loss, mean_time_between_interruptions_s, young_daly_s
from vlmpipe.planner.time.step_time import Time
from vlmpipe.trainer.sizing.checkpoint_size import checkpoint_bytes

if TYPE_CHECKING:
    from vlmpipe.catalog.prices import Prices

TERMS: tuple[Term, ...] = get_args(Term)
OLD_PRICES = "Old prices"
HOURS_UNKNOWN, OTHER_REGIONS = "How long the", "Options in other regions"
DECISIVE = (OLD_PRICES, HOURS_UNKNOWN, OTHER_REGIONS)  # begin assumptions that say what the sum lacks or a price hides
MAX_REQUESTS_SHARE = 0.1  # of a run's cost, which requests to buckets may cost without a doubt
NOT_COUNTED = "Not counted: network traffic out of the region, storage of prepared data, and logs."
PIPELINE = "pipeline steps"  # in place of a job: the pipeline's own steps, and the starts of the jobs' machines


@dataclass(frozen=True)
class StepCost:
    """One job of the run, or all steps of its pipeline. None: not known."""

    job: str
    replicas: int  # machines side by side; of the pipeline's steps, those that start
    hours: float | None
    usd_per_hour: float | None  # all replicas, with boot disks and reducers
    usd: float | None


@dataclass(frozen=True)
class TermCost:
    """The whole run on one scheduling strategy."""

    term: Term
    possible: bool
    why_not: str
    steps: tuple[StepCost, ...]
    train_hours: float | None  # with the expected loss
    lost: GoodputLoss | None
    usd: float | None
    missing: tuple[str, ...]  # prices that are not known
    old: tuple[str, ...]  # prices that were read long ago, with their day
    pipeline: PipelinePlan

    @property
    def is_lower_bound(self) -> bool:
        """Return whether something that costs money is not in the sum: a price or a job's hours are not known."""
        return self.usd is not None and (bool(self.missing) or any(step.hours is None for step in self.steps))


@dataclass(frozen=True)
class Cost:
    """The cost of one run and of its schedule. None means not known; `missing` or `assumptions` says why."""

    by_term: dict[Term, TermCost]
    term: Term  # the run file's; of capacity fallback the dearest
    usd: float | None
    steps: tuple[StepCost, ...]
    storage_bytes: int
    storage_usd_per_month: float | None
    schedule_runs_per_month: float | None
    schedule_usd_per_month: float | None
    checkpoint_every_s: float | None  # by Young and Daly, on the run file's term
    checkpoint_every_steps: int | None  # the same in steps; None where the run ends before that
    expected_lost_hours: float | None  # with the run file's interval, on its term
    min_lost_hours: float | None  # with the interval by Young and Daly
    assumptions: tuple[str, ...]
    missing: tuple[str, ...]
    capacity_fallback: tuple[Term, ...] = ()  # the terms of training's options in order; empty without a fallback
    elsewhere: dict[str, TermCost] = field(default_factory=dict)  # training's options in other regions, by name
    option_numbers: dict[str, int] = field(default_factory=dict)  # of a term or an option elsewhere, from 1
    usd_range: tuple[float, float] | None = None  # if training takes the low or the high share of its planned time
    is_lower_bound: bool = False  # `left_out` is not in the sums
    never_ends: bool = False  # interruptions take more than is computed between them
    interrupted_every_s: float = math.inf  # mean time between interruptions on the run file's term
    requests: BucketRequests | None = None  # of training to its buckets, which are not in `usd`

    @property
    def left_out(self) -> tuple[str, ...]:
        """Prices, and hours of jobs, that are not known."""
        return (*self.missing, *(f"the hours of {step.job}" for step in self.steps if step.hours is None))

    @property
    def requests_doubt(self) -> str:
        """Why requests to buckets deserve a look; empty where they cost little beside the run."""
        asked = self.requests
        if not (asked and asked.usd and self.usd) or asked.usd <= MAX_REQUESTS_SHARE * self.usd:
            return ""
        by_range = "set data.shard_reading=whole" + ("" if asked.shards_fit else " with shards that fit the cache")
        of_data = by_range if asked.reading == "ranges" else "raise data.shard_cache_gib"
        return (
            f"requests to buckets cost ${asked.usd:,.0f} more, {asked.usd / self.usd:.0%} of the run: raise "
            f"train.checkpoint_every_steps, or {of_data}"
        )

    def doubts(self, max_lost: float) -> list[str]:
        """Why to look again before this is spent, a phrase each."""
        doubts, chosen, standard = [], self.by_term[self.term], self.by_term["standard"]
        if self.is_lower_bound and self.missing:
            doubts.append(f"the cost is a lower bound, as no price is known for {'; '.join(self.missing)}")
        doubts += [self.requests_doubt] if self.requests_doubt else []
        if self.requests and not self.requests.shards_fit:
            reader = "training" if self.requests.reading == "whole" else "evaluation, unlike training,"
            doubts.append(
                f"a shard is calculated to be larger than its cache, and {reader} reads it whole: raise "
                "data.shard_cache_gib or lower data.shard_samples"
            )
        if self.term == "spot" and self.usd and standard.possible and standard.usd and self.usd > standard.usd:
            doubts.append(f"spot costs more than standard: ${self.usd:,.0f}, and ${standard.usd:,.0f} on standard")
        if chosen.lost and chosen.train_hours:
            lost = chosen.lost.total_hours / chosen.train_hours
            if lost > max_lost:
                parts = {
                    "saving checkpoints": chosen.lost.saves_hours,
                    "interruptions": chosen.lost.rework_hours + chosen.lost.restarts_hours,
                }
                doubts.append(f"{lost:.0%} of training is lost, most of it to {max(parts, key=parts.__getitem__)}")
        return doubts


def estimate_cost(case: Scenario, time: Time, cache: CacheAdvice, prices: Prices, stage: Stage = WHOLE) -> Cost:
    """Cost on every term; `term` is the run file's."""
    config, shape = case.config, case.shape
    by_term = {term: term_cost(case, time, cache, prices, term, stage) for term in TERMS}
    elsewhere = {
        option.name: term_cost(
            _in_region(case, option.location), time, cache, prices, option.scheduling_strategy, stage
        )
        for option in config.cluster.capacity_fallback
        if option.location
    }
    # With capacity fallback any option may be the one that runs: the user confirms the dearest.
    chosen = max(
        (*(by_term[term] for term in config.cluster.strategies), *elsewhere.values()),
        key=lambda estimate: math.inf if estimate.usd is None else estimate.usd,
    )
    storage_bytes = 0
    if not config.train.trainer:  # what its checkpoints hold is not known
        saved = checkpoint_bytes(shape.trainable_parameters, config.train)
        storage_bytes = (config.train.keep_checkpoints + (config.checkpoint.export == "best")) * saved
    storage_bytes += shape.total_parameters * FP32_BYTES  # the exported model
    storage_bytes += cache.bytes or 0 if cache.state == "on" else 0
    storage = prices.storage(config.gcp.location)
    runs = runs_per_month(config.schedule.cron) if config.schedule else None
    every_s, every_steps, least = _best_interval(config, time, preemptible=chosen.term == "spot")
    missing = tuple(dict.fromkeys((*chosen.missing, *storage.missing)))
    return Cost(
        by_term=by_term,
        term=chosen.term,
        capacity_fallback=tuple(
            dict.fromkeys(
                option.scheduling_strategy for option in config.cluster.capacity_fallback if not option.location
            )
        ),
        elsewhere=elsewhere,
        option_numbers=_option_numbers(config.cluster),
        usd=chosen.usd,
        usd_range=usd_range(chosen, time),
        is_lower_bound=chosen.is_lower_bound,
        never_ends=time.train_hours is not None and chosen.lost is None and not config.train.trainer,
        requests=bucket_requests(case, prices),
        interrupted_every_s=mean_time_between_interruptions_s(config, preemptible=chosen.term == "spot"),
        steps=chosen.steps,
        storage_bytes=storage_bytes,
        storage_usd_per_month=None
        if storage.usd_per_gb_month is None
        else storage_bytes / GIB * storage.usd_per_gb_month,
        schedule_runs_per_month=runs,
        schedule_usd_per_month=None if runs is None or chosen.usd is None else runs * chosen.usd,
        checkpoint_every_s=every_s,
        checkpoint_every_steps=every_steps,
        expected_lost_hours=chosen.lost.total_hours if chosen.lost else None,
        min_lost_hours=least.total_hours if least else None,
        assumptions=tuple(_assumptions(config, time, chosen, runs, old=(*chosen.old, *storage.old))),
        missing=missing,
    )


def _option_numbers(cluster: ClusterConfig) -> dict[str, int]:
    numbers: dict[str, int] = {}
    for number, option in enumerate(cluster.capacity_fallback, start=1):
        numbers.setdefault(option.name if option.location else option.scheduling_strategy, number)
    return numbers


def _in_region(case: Scenario, location: str) -> Scenario:
    """The scenario with training in another region, at its prices: those of all jobs are taken from there."""
    return replace(case, config=in_region(case.config, location))


def usd_range(chosen: TermCost, time: Time) -> tuple[float, float] | None:
    """Dollars if training takes the low or the high share of its planned time."""
    train = next((step.usd for step in chosen.steps if step.job == "train"), None)
    if chosen.usd is None or train is None or time.interval is None:
        return None
    return chosen.usd + (time.interval.low - 1) * train, chosen.usd + (time.interval.high - 1) * train


def why_not(case: Scenario, term: Term, hours: float | None) -> str:
    """Why a run cannot have its machines on this term; empty where it can."""
    machine, gpu = case.machine, case.gpu
    if term == "spot" and not machine.spot:
        return f"{machine.machine_type} is not offered as Spot"
    if term == "flex_start":
        if gpu is None or not gpu.flex_start:
            return f"flex_start does not offer {gpu.accelerator_type if gpu else 'machines without GPUs'}"
        if case.config.cluster.reduction_server:
            return "flex_start needs the same machine in all pools, so no Reduction Server"
        if hours is not None and hours * 3600 > FLEX_START_MAX_TIMEOUT_S:
            return f"flex_start ends a job after {FLEX_START_MAX_TIMEOUT_S // 86400} days"
    return ""


def term_cost(
    case: Scenario, time: Time, cache: CacheAdvice, prices: Prices, term: Term, stage: Stage = WHOLE
) -> TermCost:
    """Cost on one term, of jobs and of the pipeline's steps."""
    config, cluster, hours = (
        case.config,
        case.config.cluster,
        hours_beside_training(case, cache, is_later_stage=not stage.is_first),
    )
    lost = goodput_loss(config, time, preemptible=term == "spot")
    train_hours = time.train_hours if config.train.trainer else None
    if time.train_hours is not None and lost is not None:
        train_hours = time.train_hours + lost.rework_hours + lost.restarts_hours  # saves are in the step's time
    jobs: dict[Job, float | None] = {
        "replay": hours["replay"], "cache_features": hours["cache_features"], "train": train_hours,
        "evaluate": hours["evaluate"], "benchmark": hours["benchmark"],
        "audit": hours["audit"],
    }  # fmt: skip
    steps, missing, old = list[StepCost](), dict[str, None](), dict[str, None]()
    for job, job_hours in jobs.items():
        if job_hours == 0:
            continue
        replicas = cluster.of_job(job).replica_count
        rate, not_known, old_parts = usd_per_hour(config, prices, term, job)
        missing.update(dict.fromkeys(not_known))
        old.update(dict.fromkeys(old_parts))
        usd = None if rate is None or job_hours is None else rate * job_hours
        steps.append(StepCost(job, replicas, job_hours, rate, usd))
    refusal = why_not(case, term, train_hours)
    usd = _whole(steps)
    planned = plan_steps(
        config,
        stage,
        shape=case.shape,
        samples=all_samples(case.load.samples, config.data.validation_fraction),
        job_hours=stage.hours_of(jobs),
    )
    pipeline = priced(
        planned, prices, config.gcp.location, {step.job.replace("_", "-"): step.usd_per_hour for step in steps}
    )
    missing.update(dict.fromkeys(pipeline.missing))
    steps.append(StepCost(PIPELINE, pipeline.machines, pipeline.hours, None, pipeline.usd))
    usd = None if usd is None else usd + (pipeline.usd or 0.0)
    return TermCost(
        term, not refusal, refusal, tuple(steps), train_hours, lost, usd, tuple(missing), tuple(old), pipeline
    )


def _whole(steps: list[StepCost]) -> float | None:
    """Sum over jobs; None if that of training is not known. Other jobs without hours or price are left out."""
    if any(step.usd is None for step in steps if step.job == "train"):
        return None
    return sum(step.usd for step in steps if step.usd is not None)


def usd_per_hour(
    config: RunConfig, prices: Prices, term: Term, job: Job
) -> tuple[float | None, tuple[str, ...], tuple[str, ...]]:
    """Price of a job's replicas with boot disks and, for training, reducers; missing prices; old ones.

    None without a price of the nodes; without that of disks or reducers a lower bound.
    """
    cluster, region = config.cluster.of_job(job), config.gcp.location
    replicas = cluster.replica_count
    node = prices.machine(cluster.machine_type, cluster.accelerator_type, cluster.accelerator_count, region, term)
    disk = prices.boot_disk(cluster.boot_disk_type, region)
    is_trainings = cluster.machine_type == config.cluster.machine_type
    if (stated := config.plan.machine.usd_per_hour) is not None and is_trainings:
        node = replace(node, usd_per_hour=stated, missing=(), old=())
    missing, old = (*node.missing, *disk.missing), (*node.old, *disk.old)
    others = config.train.trainer.roles if job == "train" and config.train.trainer else None
    unlike_nodes: dict[str, int] = {}  # machine types of other pools, and how many replicas
    if others:
        replicas += others.evaluator + (0 if others.ps_machine_type else others.ps)
        if others.ps_machine_type:
            unlike_nodes[others.ps_machine_type] = others.ps
    disks = replicas + sum(unlike_nodes.values())
    if pool := cluster.reduction_server:  # training's only, and a service: its disks are not priced
        unlike_nodes[pool.machine_type] = reducer_count(cluster)
    rates = []
    for machine_type, count in unlike_nodes.items():
        other = prices.machine(machine_type, "", 0, region, term)
        missing, old = (*missing, *other.missing), (*old, *other.old)
        rates.append(count * (other.usd_per_hour or 0.0))
    if node.usd_per_hour is None:
        return None, missing, old
    disk_usd_per_hour = cluster.boot_disk_size_gb * (disk.usd_per_gb_month or 0.0) / HOURS_PER_MONTH
    return replicas * node.usd_per_hour + disks * disk_usd_per_hour + sum(rates), missing, old


def _best_interval(
    config: RunConfig, time: Time, *, preemptible: bool
) -> tuple[float | None, int | None, GoodputLoss | None]:
    mtbf_s = mean_time_between_interruptions_s(config, preemptible=preemptible)
    if time.step_s is None or time.save is None or math.isinf(mtbf_s):
        return None, None, None
    every_s = max(young_daly_s(time.save.blocks_s, mtbf_s), time.save.writes_s)  # a save waits for the one before
    steps = max(1, round(every_s / time.working_s))
    if time.steps is not None and steps >= time.steps:  # the one at the end is saved anyway
        return every_s, None, goodput_loss(config, time, preemptible=preemptible, every_s=time.steps * time.working_s)
    return every_s, steps, goodput_loss(config, time, preemptible=preemptible, every_s=steps * time.working_s)


def _reading(time: Time) -> str:
    """Describe what a resume adds to a restart, where it shows."""
    if time.save is None or time.save.reads_s < 1:
        return ""
    reads = "in which each node reads published weights and its part of the checkpoint"
    return f" besides the {time.save.reads_s:,.0f} s {reads}"


def _assumptions(
    config: RunConfig, time: Time, chosen: TermCost, runs: float | None, *, old: tuple[str, ...]
) -> Iterator[str]:
    plan = config.plan
    if fallback := config.cluster.capacity_fallback:
        options = ", then ".join(f"{option.name} for {option.wait}" for option in fallback)
        yield (
            f"Training tries {options} (cluster.capacity_fallback; 0s waits without end). The cost is that of the "
            f"dearest, {chosen.term}; waiting costs nothing, and what an earlier option trained is not trained again."
        )
    if any(option.location for option in fallback):
        yield (
            f"{OTHER_REGIONS} read data and write checkpoints in the bucket of {config.gcp.location}: that is "
            "slower, and its network traffic is not in the cost."
        )
    if plan.failures_per_gpu_hour:
        yield (
            f"A GPU or its machine fails once in {1 / plan.failures_per_gpu_hour:,.0f} GPU-hours "
            "(plan.failures_per_gpu_hour), which stops all nodes as a preemption does."
        )
    if "spot" in config.cluster.strategies:
        yield (
            f"A Spot node{' or reducer' * bool(config.cluster.reduction_server)} is preempted "
            f"{plan.preemptions_per_node_hour:g} times an hour (no platform states a rate; "
            f"plan.preemptions_per_node_hour). All nodes then restart, {plan.restart_s:.0f} s pass to the next step "
            f"(plan.restart_s){_reading(time)}, and all of that is taken as billed."
        )
    for step in chosen.steps:
        if step.hours is None:
            yield f"{HOURS_UNKNOWN} {step.job} job takes is not known, so its cost is not in the sum."
    if old:
        yield (
            f"{OLD_PRICES}: those of {', '.join(dict.fromkeys(old))}. Prices of Spot and flex_start, old after "
            f"{FLOATING_OLD_AFTER_DAYS} days, change often, others, old after {OLD_AFTER_DAYS}, rarely: look them up, "
            "and give your own with plan.prices_file."
        )
    if runs is not None:
        yield "Each scheduled run is taken to encode all images and train all steps; reused features make it cheaper."
    yield NOT_COUNTED
