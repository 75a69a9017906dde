"""`vlmpipe plan --suggest`: compares machines, nodes and strategies for the same training.

What the model learns stays as it is: rows, steps and the batch of a step do not change. Only what the trainer can run
is suggested, and only what the planner's own checks let through.

Time and price of a way take a millisecond and its memory takes traces, so ways are put in the goal's order first, and
memory is looked at from the best on, until there are enough.
"""

from __future__ import annotations

import heapq
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trainer.config.train import NOT_SELECTIVE
from trainer.errors import ConfigError
from vlmpipe.catalog.machines import load_catalog
from vlmpipe.catalog.prices import Prices
from vlmpipe.config.run_config import RunConfig, parse_run_config
from vlmpipe.config.yaml_loader import apply_overrides
from vlmpipe.job_spec.build import JOBS, job_violations
from vlmpipe.planner.cost import estimate as cost
from vlmpipe.planner.memory.estimate import estimate_memory
from vlmpipe.planner.memory.rank import GIB
from vlmpipe.planner.model_architecture import Architecture
from vlmpipe.planner.parallel_layout import layout_of
from vlmpipe.planner.search.memory import SearchMemory
from vlmpipe.planner.search.space import Cluster, Degrees, candidates, clusters
from vlmpipe.planner.time import feature_cache
from vlmpipe.planner.time.feature_cache import CacheAdvice
from vlmpipe.planner.time.step_time import estimate_time
from vlmpipe.planner.workload import Workload

CHECKPOINTING_WORDS = {"none": (), "selective": ("selective checkpointing",), "full": ("checkpointing",)}
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

    def order(self, one: _Candidate) -> tuple[float, float]:
        """Sorting key: the best first."""
        by_hours, by_usd = (one.hours, one.usd), (one.usd, one.hours)
        return by_hours if self.kind in ("fastest", "under") else by_usd

    def allows(self, one: _Candidate) -> bool:
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
    load: Workload
    cache: CacheAdvice
    prices: Prices


@dataclass(frozen=True)
class _Candidate:
    """A suggestion whose memory is not known yet. `config` is unchecked: there are thousands."""

    cluster: Cluster
    change: dict[str, Any]
    config: RunConfig
    step_s: float
    mfu: float
    hours: float
    usd: float

    @property
    def capacity_bytes(self) -> int:
        return int(self.cluster.gpu.memory_gib * GIB)

    @property
    def kind(self) -> tuple[str, str, int, int, str]:
        """Of one kind the best is shown: the same strategy on the same machines."""
        place = self.cluster
        machine, gpu = place.machine.machine_type, place.gpu.accelerator_type
        return machine, gpu, place.gpus_per_node, place.nodes, self.config.train.strategy


def suggest(
    config: RunConfig, model: Architecture, load: Workload, prices: Prices, goal: Goal, *, most: int = 5
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
    gpu = load_catalog().gpus.get(config.cluster.accelerator_type)
    cache = feature_cache.advise(config, load.sized(model.shape), layout_of(config), load, gpu, prices)
    features = config.features.model_copy(update={"cache": cache.state})
    search = _Search(config.model_copy(update={"features": features}), model, load, cache, prices)
    memory = SearchMemory(model, load, cached=cache.state == "on")
    best = list(itertools.islice(_fitting(search, memory, goal), most))
    if not best:
        bound = {"under": f" for ${goal.bound:,.0f}", "by": f" in {goal.bound:g} hours"} if goal.bound else {}
        raise ConfigError(
            f"nothing on {config.cluster.scheduling_strategy} capacity in {config.gcp.location} that has a price "
            "trains this"
            f"{bound.get(goal.kind, '')}",
            expected="a bound that some machines meet",
            fix="raise it, or change cluster.scheduling_strategy, gcp.location or plan.prices_file",
        )
    return best


def _candidates(search: _Search, memory: SearchMemory) -> Iterator[_Candidate]:
    """All that may fit, with their time and price."""
    base = search.config
    places = list(clusters(base, load_catalog(), search.prices))
    sequence = base.train.sequence_parallel
    degrees = Degrees.of(search.model, places, cached=memory.cached, sequence=sequence)
    for place in places:
        in_place = place.change(base)
        for change in candidates(base, place, degrees):
            config = _with(base, in_place | change)
            if memory.least_bytes(config) <= place.gpu.memory_gib * GIB:
                way = _priced(search, place, in_place | change, config)
                if way:
                    yield way


def _with(config: RunConfig, change: dict[str, Any]) -> RunConfig:
    """Unchecked, for speed. `_suggestion` checks those that are shown."""
    sections: dict[str, dict[str, Any]] = {}
    for field, value in change.items():
        section, _, name = field.partition(".")
        sections.setdefault(section, {})[name] = value
    updated = {name: getattr(config, name).model_copy(update=fields) for name, fields in sections.items()}
    return config.model_copy(update=updated)


def _priced(search: _Search, place: Cluster, change: dict[str, Any], config: RunConfig) -> _Candidate | None:
    layout, shape, cache = layout_of(config), search.load.sized(search.model.shape), search.cache
    time = estimate_time(config, shape, layout, search.load, place.machine, place.gpu, cached=cache.state == "on")
    others = cost.hours_beside_training(config, shape, layout, search.load, cache, place.gpu)
    term = config.cluster.scheduling_strategy
    price = cost.term_cost(config, time, others, place.machine, place.gpu, search.prices, term)
    if time.step_s is None or time.mfu is None or price.train_hours is None or price.usd is None:
        return None
    return _Candidate(place, change, config, time.step_s, time.mfu, price.train_hours, price.usd)


def _fitting(search: _Search, memory: SearchMemory, goal: Goal) -> Iterator[Suggestion]:
    """Those that fit, the best first: of each kind one."""
    shown = set()
    queue = [
        (goal.order(way), number, way) for number, way in enumerate(_candidates(search, memory)) if goal.allows(way)
    ]
    heapq.heapify(queue)
    while queue:
        _, number, way = heapq.heappop(queue)
        if way.kind in shown:
            continue
        try:
            fits = memory.bytes(way.config) <= way.capacity_bytes
            one = _suggestion(search, way) if fits else None
        except ConfigError:  # the trainer would refuse it
            continue
        if one:
            shown.add(way.kind)
            yield one
        elif checkpointing := _more_checkpointing(way.config):
            change = {"train.activation_checkpointing": checkpointing}
            again = _priced(search, way.cluster, way.change | change, _with(way.config, change))
            if again and goal.allows(again):
                heapq.heappush(queue, (goal.order(again), number, again))


def _more_checkpointing(config: RunConfig) -> str:
    """The next less memory for more computing; empty for the least."""
    train = config.train
    if train.activation_checkpointing == "none" and train.strategy not in NOT_SELECTIVE:
        return "selective"
    return "full" if train.activation_checkpointing != "full" else ""


def _suggestion(search: _Search, way: _Candidate) -> Suggestion | None:
    """With its memory traced anew, as a plan of it does; None where that or its jobs are refused.

    Raises ConfigError where the run file with the change is not valid.
    """
    config = parse_run_config(apply_overrides(search.config.to_dict(), way.change), "a suggestion")
    if any(found.severity == "error" for job in JOBS for found in job_violations(config, job, "gs://bucket/run")):
        return None
    place = way.cluster
    memory = estimate_memory(config, search.model, place.machine, place.gpu, load=search.load, nearest=False)
    if not memory.fits:
        return None
    return Suggestion(
        change=way.change,
        machines=f"{place.nodes} x {place.machine.machine_type} ({place.gpus_per_node} GPUs)",
        strategy=_in_words(config),
        memory_gib=memory.total_bytes / GIB,
        capacity_gib=place.gpu.memory_gib,
        step_s=way.step_s,
        mfu=way.mfu,
        hours=way.hours,
        usd=way.usd,
    )


def _in_words(config: RunConfig) -> str:
    train = config.train
    sequences = f"{train.micro_batch_size} sequence{'' if train.micro_batch_size == 1 else 's'}"
    return ", ".join(
        [
            train.strategy,
            *([f"{train.tensor_parallel} ranks a layer"] if train.tensor_parallel > 1 else []),
            *(["shared tokens"] if train.sequence_parallel else []),
            *([f"{train.pipeline_parallel} stages"] if train.pipeline_parallel > 1 else []),
            sequences,
            *CHECKPOINTING_WORDS[train.activation_checkpointing],
        ]
    )
