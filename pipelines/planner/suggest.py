"""`vlmpipe plan --suggest`: other machines, nodes and strategies for the same training, and the best of them.

What the model learns stays as it is: rows, steps and the batch of a step do not change. Only what the trainer can run
is suggested, and only what the planner's own checks let through. Tensor and pipeline parallelism are planned where the
run file asks for them, not suggested.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pipelines.config import RunConfig, parse_run_config
from pipelines.planner import cost, feature_cache
from pipelines.planner.activations import Activations, Computing, activations, computing_of
from pipelines.planner.architecture import Architecture
from pipelines.planner.catalog import Catalog, Gpu, Machine, load_catalog
from pipelines.planner.device_memory import estimate_memory
from pipelines.planner.feature_cache import CacheAdvice
from pipelines.planner.job_spec import JOBS, job_violations
from pipelines.planner.layout import STRATEGIES, layout_of
from pipelines.planner.memory import GIB, device_parts, fullest, training_moments
from pipelines.planner.prices import Prices
from pipelines.planner.row_load import RowLoad
from pipelines.planner.throughput import estimate_time
from pipelines.run_file import apply_overrides
from trainer.config import NOT_SELECTIVE, PIPELINE_PARALLEL, TENSOR_PARALLEL
from trainer.errors import ConfigError

NODES = (1, 2, 4, 8, 16)
MICRO_BATCH_ROWS = (1, 2, 4, 8)
# Every number of ranks that layers are split over needs traces of its own, which take longer than all the others.
WHOLE_LAYERS = [name for name in STRATEGIES if name not in (*TENSOR_PARALLEL, *PIPELINE_PARALLEL)]
_GOAL = re.compile(r"^(?P<kind>cheapest|fastest|under|by)(:(?P<bound>[0-9]+(\.[0-9]+)?))?$")


@dataclass(frozen=True)
class Goal:
    """cheapest; fastest; under a number of dollars, the fastest; by a number of hours, the cheapest."""

    kind: str
    bound: float | None = None

    @classmethod
    def parse(cls, text: str) -> Goal:
        """Raises ConfigError for anything but cheapest, fastest, under:USD and by:HOURS."""
        found = _GOAL.match(text)
        if not found or (found["kind"] in ("under", "by")) != bool(found["bound"]):
            raise ConfigError(f"--suggest is {text!r}", expected="cheapest, fastest, under:USD or by:HOURS")
        return cls(found["kind"], float(found["bound"]) if found["bound"] else None)

    def order(self, one: Suggestion) -> tuple[float, float]:
        """Sorting key: the best first."""
        by_hours, by_usd = (one.hours, one.usd), (one.usd, one.hours)
        return by_hours if self.kind in ("fastest", "under") else by_usd

    def allows(self, one: Suggestion) -> bool:
        """Whether it keeps to the bound."""
        if self.bound is None:
            return True
        return (one.usd if self.kind == "under" else one.hours) <= self.bound


@dataclass(frozen=True)
class Suggestion:
    """One way to run the training. `change` are fields of the run file."""

    change: dict[str, Any]
    machines: str
    strategy: str
    memory_gib: float
    capacity_gib: float
    step_s: float
    mfu: float
    hours: float  # of the training job, with what is expected to be lost
    usd: float  # of the whole run


@dataclass(frozen=True)
class _Search:
    config: RunConfig
    model: Architecture
    load: RowLoad
    cache: CacheAdvice
    prices: Prices
    catalog: Catalog


def suggest(
    config: RunConfig, model: Architecture, load: RowLoad, prices: Prices, goal: Goal, *, most: int = 5
) -> list[Suggestion]:
    """The best `most` ways on the run file's region and term of capacity, the best first.

    Raises ConfigError when it is not known how much there is to train, or when nothing meets the goal.
    """
    if load.steps is None:
        raise ConfigError(
            "how many steps the run has is not known, so its hours and dollars are not either",
            expected="prepared data, train.max_steps, or plan.samples with plan.sample_tokens",
            fix="add for example plan.samples=100000 plan.sample_tokens=800",
        )
    catalog = load_catalog()
    gpu = catalog.gpus.get(config.cluster.accelerator_type)
    cache = feature_cache.advise(config, model.shape, layout_of(config), load, gpu, prices)
    features = config.features.model_copy(update={"cache": cache.state})
    config = config.model_copy(update={"features": features})
    search = _Search(config, model, load, cache, prices, catalog)
    found = sorted((one for one in _candidates(search) if goal.allows(one)), key=goal.order)
    checked = list(itertools.islice((one for one in found if _holds(search, one)), most))
    if not checked:
        bound = {"under": f" for ${goal.bound:,.0f}", "by": f" in {goal.bound:g} hours"} if goal.bound else {}
        raise ConfigError(
            f"nothing on {config.cluster.strategy} capacity in {config.gcp.location} that has a price trains this"
            f"{bound.get(goal.kind, '')}",
            expected="a bound that some machines meet",
            fix="raise it, or change cluster.strategy, gcp.location or plan.prices_file",
        )
    return checked


def _candidates(search: _Search) -> Iterator[Suggestion]:
    """For each cluster and strategy the fastest that fits: a slower one has the same price an hour."""
    traces: dict[tuple[Computing, str], tuple[Activations, Activations]] = {}
    for machine, gpu, count in _machines(search):
        for nodes in NODES:
            for strategy in WHOLE_LAYERS:
                ways = list(_ways(search, machine, gpu, count, nodes, strategy, traces))
                if ways:
                    yield min(ways, key=lambda one: one.step_s)


def _machines(search: _Search) -> Iterator[tuple[Machine, Gpu, int]]:
    config, term = search.config, search.config.cluster.strategy
    for machine in search.catalog.machines.values():
        sold = {"spot": machine.spot, "standard": machine.on_demand, "flex_start": True}[term]
        if machine.needs_reservation or not sold:
            continue
        for accelerator_type, counts in machine.accelerators.items():
            gpu = search.catalog.gpus[accelerator_type]
            in_region = config.gcp.location in search.catalog.regions.get(accelerator_type, ())
            usable = gpu.bf16_tflops is not None or config.train.precision != "bf16"
            if in_region and usable and (gpu.flex_start or term != "flex_start"):
                for count in counts:
                    quote = search.prices.machine(
                        machine.machine_type, accelerator_type, count, config.gcp.location, term
                    )
                    if quote.usd_per_hour is not None:
                        yield machine, gpu, count


def _ways(
    search: _Search,
    machine: Machine,
    gpu: Gpu,
    count: int,
    nodes: int,
    strategy: str,
    traces: dict[tuple[Computing, str], tuple[Activations, Activations]],
) -> Iterator[Suggestion]:
    base = search.config
    for rows in MICRO_BATCH_ROWS:
        if base.train.global_batch_rows % (nodes * count * rows):
            continue
        for checkpointing in ("none", "selective", "full"):
            if checkpointing == "selective" and strategy in NOT_SELECTIVE:
                continue
            change = _change(base, machine, gpu, count, nodes)
            change |= {
                "train.strategy": strategy,
                "train.micro_batch_rows": rows,
                "train.activation_checkpointing": checkpointing,
            }
            if base.train.model_ranks > 1:
                change |= {"train.tensor_parallel": 1, "train.pipeline_parallel": 1}
            config = _with(base, change)
            if not layout_of(config).is_known_to_trainer:
                continue
            key = (computing_of(config), checkpointing)
            if key not in traces:
                traces[key] = _of_one_and_two_rows(search, config)
            of_one, of_two = traces[key]
            one = _suggestion(search, config, change, machine, gpu, of_one.of_rows(rows, of_two))
            if one:
                yield one


def _of_one_and_two_rows(search: _Search, config: RunConfig) -> tuple[Activations, Activations]:
    """What micro-batches of one and of two rows hold, which gives any number of them."""
    rows = (_with(config, {"train.micro_batch_rows": count}) for count in (1, 2))
    shape, model = search.model.shape, search.model.model
    of_one, of_two = (activations(each.model_copy(update={"model": model}), shape) for each in rows)
    return of_one, of_two


def _change(base: RunConfig, machine: Machine, gpu: Gpu, count: int, nodes: int) -> dict[str, Any]:
    disks = machine.boot_disk_types
    return {
        "cluster.machine_type": machine.machine_type,
        "cluster.accelerator_type": gpu.accelerator_type,
        "cluster.accelerator_count": count,
        "cluster.replica_count": nodes,
        "cluster.boot_disk_type": base.cluster.boot_disk_type if base.cluster.boot_disk_type in disks else disks[0],
        "cluster.reduction_server": None,
        "cluster.restart_job_on_worker_restart": nodes > 1 or base.cluster.restart_job_on_worker_restart,
    }


def _with(config: RunConfig, change: dict[str, Any]) -> RunConfig:
    """Unchecked, for speed: there are thousands. `_holds` checks those that are shown."""
    sections: dict[str, dict[str, Any]] = {}
    for field, value in change.items():
        section, _, name = field.partition(".")
        sections.setdefault(section, {})[name] = value
    updated = {name: getattr(config, name).model_copy(update=fields) for name, fields in sections.items()}
    return config.model_copy(update=updated)


def _suggestion(
    search: _Search, config: RunConfig, change: dict[str, Any], machine: Machine, gpu: Gpu, held: Activations
) -> Suggestion | None:
    layout, shape, train = layout_of(config), search.model.shape, config.train
    cached = search.cache.state == "on"
    moments = training_moments(
        shape,
        layout,
        held,
        cached=cached,
        precision=train.precision,
        passes=train.global_batch_rows // (layout.data_parallel * train.micro_batch_rows),
        checkpointing=train.activation_checkpointing == "full",
        offload=train.offload,
    )
    parts = [part for part in fullest(moments)[1] if not part.on_host]
    total_bytes = sum(part.bytes for part in [*parts, *device_parts(parts, layout)])
    if total_bytes > gpu.memory_gib * GIB:
        return None
    time = estimate_time(config, shape, layout, search.load, machine, gpu, cached=cached)
    price = cost.estimate_cost(config, shape, layout, search.load, time, search.cache, machine, gpu, search.prices)
    hours = price.by_term[price.term].train_hours
    if time.step_s is None or time.mfu is None or hours is None or price.usd is None:
        return None
    return Suggestion(
        change=change,
        machines=f"{config.cluster.replica_count} x {machine.machine_type} ({config.cluster.accelerator_count} GPUs)",
        strategy=f"{train.strategy}, {train.micro_batch_rows} rows"
        + {"none": "", "selective": ", selective checkpointing", "full": ", checkpointing"}[
            train.activation_checkpointing
        ],
        memory_gib=total_bytes / GIB,
        capacity_gib=gpu.memory_gib,
        step_s=time.step_s,
        mfu=time.mfu,
        hours=hours,
        usd=price.usd,
    )


def _holds(search: _Search, one: Suggestion) -> bool:
    """Whether the run file with the change is valid, its jobs are, and the memory fits when traced anew."""
    try:
        config = parse_run_config(apply_overrides(search.config.to_dict(), one.change), "a suggestion")
    except ConfigError:
        return False
    if any(found.severity == "error" for job in JOBS for found in job_violations(config, job, "gs://bucket/run")):
        return False
    machine, gpu = (
        search.catalog.machines[config.cluster.machine_type],
        search.catalog.gpus[config.cluster.accelerator_type],
    )
    return estimate_memory(config, search.model, machine, gpu, load=search.load, nearest=False).fits
