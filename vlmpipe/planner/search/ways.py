"""Ways to run a training: each with its time and price, and its memory once it is worth a look.

Time and price of a candidate take a millisecond, its memory takes traces. So candidates are sorted by the goal first,
and memory is estimated from the best on until enough of them fit.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from vlmpipe.catalog.machines import load_catalog
from vlmpipe.catalog.prices import Prices
from vlmpipe.config.overrides import apply_overrides
from vlmpipe.config.run_config import RunConfig, parse_run_config
from vlmpipe.job_spec.build import jobs_of
from vlmpipe.job_spec.check import job_violations
from vlmpipe.planner.cost import estimate as cost
from vlmpipe.planner.cost.estimate import TermCost
from vlmpipe.planner.jobs.memory import memory_beside_training
from vlmpipe.planner.memory.activations import can_recompute_tower
from vlmpipe.planner.memory.estimate import estimate_memory
from vlmpipe.planner.memory.rank import GIB
from vlmpipe.planner.model_architecture import Architecture
from vlmpipe.planner.parallel_layout import layout_of, more_context_parallel
from vlmpipe.planner.scenario import Scenario
from vlmpipe.planner.search.choice import Choice
from vlmpipe.planner.search.memory import SearchMemory
from vlmpipe.planner.search.space import Cluster, Degrees, candidates
from vlmpipe.planner.time import feature_cache
from vlmpipe.planner.time.feature_cache import CacheAdvice
from vlmpipe.planner.time.step_time import Time, estimate_time
from vlmpipe.planner.workload import Workload
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.sizing.model_shape import ModelShape

CHECKPOINTING_WORDS = {"none": "", "selective": "selective checkpointing", "full": "checkpointing"}
_GOAL = re.compile(r"^(?P<kind>cheapest|fastest|under|by)(:(?P<bound>[0-9]+(\.[0-9]+)?))?$")


@dataclass(frozen=True)
class Goal:
    """cheapest; fastest; under a number of dollars, the fastest; by a number of hours, the cheapest."""

    kind: str
    bound: float | None = None

    @classmethod
    def parse(cls, text: str) -> Goal:
        """Raises ConfigError for anything but cheapest, fastest, under:USD and by:HOURS."""
        match = _GOAL.match(text)
        if not match or (match["kind"] in ("under", "by")) != bool(match["bound"]):
            raise ConfigError(f"--suggest is {text!r}", expected="cheapest, fastest, under:USD or by:HOURS")
        return cls(match["kind"], float(match["bound"]) if match["bound"] else None)

    def value(self, hours: float, usd: float) -> float:
        """Quantity to minimize."""
        return hours if self.kind in ("fastest", "under") else usd

    def allows(self, candidate: Candidate) -> bool:
        """Return whether a candidate is within the bound."""
        if self.bound is None:
            return True
        return (candidate.usd if self.kind == "under" else candidate.hours) <= self.bound


@dataclass(frozen=True)
class Suggestion:
    """One way to run the training. `change` are fields of the run file."""

    change: dict[str, object]
    machines: str
    strategy: str
    memory_gib: float
    capacity_gib: float
    step_s: float
    mfu: float
    hours: float  # of the training job, with what is expected to be lost
    usd: float  # of the whole run
    hours_range: tuple[float, float] | None = None
    usd_range: tuple[float, float] | None = None
    start_min: float = 0.0  # until the training job's machines train
    is_lower_bound: bool = False  # a part of it has no price
    fits: bool = True  # only today's settings are shown where they do not


@dataclass(frozen=True)
class Search:
    config: RunConfig
    model: Architecture
    load: Workload
    cache: CacheAdvice
    prices: Prices
    memory: SearchMemory
    extra: dict[str, object] = field(default_factory=dict)  # fields of the run file that all its candidates change


@dataclass(frozen=True)
class Candidate:
    """A possible suggestion. Its memory is not known yet, and `config` is not validated: there are thousands."""

    cluster: Cluster
    change: dict[str, object]
    config: RunConfig
    time: Time
    price: TermCost
    hours: float
    usd: float
    value: float  # hours or dollars, by the goal
    search: Search  # with its model, whose frozen weights may be sharded

    @property
    def strategy(self) -> str:
        return self.config.train.strategy

    @property
    def nodes(self) -> int:
        return self.cluster.nodes

    @property
    def machine(self) -> tuple[object, ...]:
        """One row each."""
        return self.cluster.machine.machine_type, self.cluster.gpu.accelerator_type, self.cluster.gpus_per_node


@dataclass(frozen=True)
class Fit:
    """A candidate that fits."""

    way: Candidate
    shown: Suggestion

    @property
    def strategy(self) -> str:
        return self.way.strategy

    @property
    def nodes(self) -> int:
        return self.way.nodes

    @property
    def hours(self) -> float:
        return self.way.hours

    @property
    def value(self) -> float:
        return self.way.value


def search_of(config: RunConfig, model: Architecture, load: Workload, prices: Prices) -> Search:
    """The search, with the decision about the feature cache. Raises ConfigError if the number of steps is not known."""
    if load.steps is None:
        raise ConfigError(
            "the number of steps is not known, so hours and dollars are not either",
            expected="prepared data, train.max_steps, or plan.samples with plan.sample_tokens",
            fix="add for example plan.samples=100000 plan.sample_tokens=800",
        )
    gpu = load_catalog().gpus.get(config.cluster.accelerator_type)
    cache = feature_cache.advise(config, load.sized(model.shape), layout_of(config), load, gpu, prices)
    base = config.model_copy(update={"features": config.features.model_copy(update={"cache": cache.state})})
    return Search(base, model, load, cache, prices, SearchMemory(model, load, cached=cache.state == "on"))


def ways_on(search: Search, goal: Goal, places: Sequence[Cluster]) -> Iterator[Candidate]:
    """Candidates on these clusters that may fit, with their time and price."""
    base, memory = search.config, search.memory
    degrees = Degrees.of(search.model, places, cached=memory.cached, sequence=base.train.sequence_parallel)
    for place in places:
        for change, config in settings_on(search, place, degrees):
            if memory.min_bytes(config) <= place.gpu.memory_gib * GIB:
                way = priced(search, goal, place, change, config)
                if way:
                    yield way


def settings_on(search: Search, place: Cluster, degrees: Degrees) -> Iterator[tuple[dict[str, object], RunConfig]]:
    """Changes of the run file, and the changed run file, for all that can be tried on a cluster."""
    in_place = place.change(search.config) | search.extra
    for change in candidates(search.config, place, degrees):
        if search.extra and change.get("train.shard_frozen_weights") is False:
            continue  # a way of the search without
        yield in_place | change, changed(search.config, in_place | change)


def changed(config: RunConfig, change: dict[str, object]) -> RunConfig:
    """The changed run file, not validated, for speed. `suggestion` validates those that are shown."""
    sections: dict[str, dict[str, object]] = {}
    for key, value in change.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    updated = {name: getattr(config, name).model_copy(update=fields) for name, fields in sections.items()}
    return config.model_copy(update=updated)


def priced(
    search: Search, goal: Goal, place: Cluster, change: dict[str, object], config: RunConfig
) -> Candidate | None:
    layout, shape, cache = layout_of(config), search.load.sized(search.model.shape), search.cache
    case = Scenario(config, shape, layout, search.load, place.machine, place.gpu, cached=cache.state == "on")
    time = estimate_time(case)
    price = cost.term_cost(case, time, cache, search.prices, config.cluster.scheduling_strategy)
    if time.step_s is None or time.mfu is None or price.train_hours is None or price.usd is None:
        return None
    value = goal.value(price.train_hours, price.usd)
    return Candidate(place, change, config, time, price, price.train_hours, price.usd, value, search)


def chosen(
    ways: Iterable[Candidate], goal: Goal, judge: Callable[[Search, Candidate], Suggestion | None] | None = None
) -> Fit | None:
    """Return the best candidate that fits, including variants with less memory and more time; None if none fits."""
    queue = [(way.value, number, way) for number, way in enumerate(ways)]
    heapq.heapify(queue)
    choice = Choice[Fit]()
    while queue:
        _, number, way = heapq.heappop(queue)
        search = way.search
        if not choice.wants(way):
            continue
        try:
            fits = search.memory.bytes(way.config) <= int(way.cluster.gpu.memory_gib * GIB)
            judged = (judge or suggestion)(search, way) if fits else None
        except ConfigError:  # the trainer would refuse it
            continue
        if judged:
            choice.take(Fit(way, judged))
        elif change := less_memory(way.config, search.model.shape):
            again = priced(search, goal, way.cluster, way.change | change, changed(way.config, change))
            if again and goal.allows(again):
                heapq.heappush(queue, (again.value, number, again))
    return choice.way


def less_memory(config: RunConfig, shape: ModelShape) -> dict[str, Any]:
    """The next change that takes less memory and more time: more activation checkpointing, of a trained tower too, then
    ranks of a node that share a sequence. Empty after the last."""
    train = config.train
    if train.activation_checkpointing == "none":
        return {"train.activation_checkpointing": "selective"}
    if train.activation_checkpointing != "full":
        return {"train.activation_checkpointing": "full"}
    if can_recompute_tower(config, shape):
        return {"train.tower_activation_checkpointing": True}
    if train.micro_batch_size > 1:  # candidates with fewer sequences share none
        return {}
    return next(iter(more_context_parallel(config, shape.language.heads)), {})


def suggestion(search: Search, way: Candidate) -> Suggestion | None:
    """The candidate, if it and the run's other jobs can run. Raises ConfigError if the run file is not valid."""
    config = _valid(search, way)
    if any(
        violation.severity == "error"
        for job in jobs_of(config)
        for violation in job_violations(config, job, "gs://bucket/run")
    ):
        return None
    way_of_training = of_training(search, way)
    others = memory_beside_training(
        config, search.load.sized(search.model.shape), search.load, encodes=search.memory.cached
    )
    return way_of_training if way_of_training and all(job.fits for job in others) else None


def of_training(search: Search, way: Candidate) -> Suggestion | None:
    """The candidate with its memory traced as in its own plan; None if training does not fit.

    Raises ConfigError if the changed run file is not valid.
    """
    config, place = _valid(search, way), way.cluster
    memory = estimate_memory(config, search.model, place.machine, place.gpu, load=search.load, nearest=False)
    return described(way, config, memory.total_bytes / GIB) if memory.fits else None


def _valid(search: Search, way: Candidate) -> RunConfig:
    return parse_run_config(apply_overrides(search.config.to_dict(), way.change), "a suggestion")


def described(way: Candidate, config: RunConfig, memory_gib: float, *, fits: bool = True) -> Suggestion:
    place, interval = way.cluster, way.time.interval
    gpus = place.gpus_per_node
    return Suggestion(
        change=way.change,
        machines=f"{place.nodes} x {place.machine.machine_type} ({gpus} GPU{'s' * (gpus > 1)})",
        strategy=_in_words(config),
        memory_gib=memory_gib,
        capacity_gib=place.gpu.memory_gib,
        step_s=way.time.step_s or 0.0,
        mfu=way.time.mfu or 0.0,
        hours=way.hours,
        usd=way.usd,
        hours_range=(interval.low * way.hours, interval.high * way.hours) if interval else None,
        usd_range=cost.usd_range(way.price, way.time),
        start_min=sum(step.start_s for step in way.price.pipeline.steps if step.name == "train") / 60,
        is_lower_bound=way.price.is_lower_bound,
        fits=fits,
    )


def _in_words(config: RunConfig) -> str:
    train = config.train
    words = [
        train.strategy,
        "frozen weights sharded" if train.shard_frozen_weights else "",
        f"{train.tensor_parallel} ranks a layer" if train.tensor_parallel > 1 else "",
        "shared tokens" if train.sequence_parallel else "",
        f"{train.context_parallel} ranks a sequence" if train.context_parallel > 1 else "",
        f"{train.pipeline_parallel} stages" if train.pipeline_parallel > 1 else "",
        f"{train.micro_batch_size} sequence{'' if train.micro_batch_size == 1 else 's'}",
        CHECKPOINTING_WORDS[train.activation_checkpointing],
        "tower recomputed" if train.tower_activation_checkpointing else "",
    ]
    return ", ".join(filter(None, words))
