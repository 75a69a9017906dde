"""`vlmpipe plan --suggest`: compares machines, nodes and strategies for the same training.

Packed sequences, steps and the global batch do not change, so the model learns the same. Candidates are those that the
trainer can run and the planner's checks accept. A forecast's error is larger than most differences:
`vlmpipe.planner.search.choice` decides between ways that it cannot tell apart.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from vlmpipe.catalog.machines import load_catalog
from vlmpipe.catalog.prices import Prices
from vlmpipe.config.run_config import RunConfig
from vlmpipe.planner.memory.estimate import estimate_memory
from vlmpipe.planner.memory.rank import GIB
from vlmpipe.planner.model_architecture import Architecture
from vlmpipe.planner.search.choice import ordered, worth_its_nodes
from vlmpipe.planner.search.memory import SearchMemory
from vlmpipe.planner.search.space import Cluster, clusters, left_out
from vlmpipe.planner.search.ways import (
    Candidate,
    Fit,
    Goal,
    Search,
    Suggestion,
    chosen,
    described,
    priced,
    search_of,
    ways_on,
)
from vlmpipe.planner.workload import Workload
from vlmpipe.trainer.errors import ConfigError


@dataclass(frozen=True)
class Suggestions:
    """Ways to run the training, the best first, and machines that could not be compared, with why.

    today: the run file's own settings; None where they cannot be estimated, with why in without_today.
    """

    ways: tuple[Suggestion, ...]
    left_out: tuple[str, ...]
    today: Suggestion | None = None
    without_today: str = ""

    def as_dict(self) -> dict[str, object]:
        """For `plan --suggest --json`."""
        return {
            "today": vars(self.today) if self.today else None,
            "suggestions": [vars(way) for way in self.ways],
            "left_out": [*self.left_out, *filter(None, [self.without_today])],
        }


def suggest(
    config: RunConfig, model: Architecture, load: Workload, prices: Prices, goal: Goal, *, most: int = 5
) -> Suggestions:
    """Ways in the run file's region and on its scheduling strategy, one a machine, `most` of them.

    Raises ConfigError if the number of steps is not known, or if nothing meets the goal.
    """
    searches = [search_of(config, model, load, prices)]
    base = searches[0].config
    if other := _with_sharded_frozen_weights(searches[0]):
        searches.append(other)
    by_machine: dict[tuple[object, ...], list[Candidate]] = {}
    places = list(clusters(base, load_catalog(), prices))
    for search in searches:
        for way in ways_on(search, goal, places):
            if goal.allows(way):
                by_machine.setdefault(way.machine, []).append(way)
    rows: list[Fit] = []
    for ways in sorted(by_machine.values(), key=lambda ways: min(way.value for way in ways)):
        if len(rows) >= most and min(way.value for way in ways) > sorted(row.value for row in rows)[most - 1]:
            break
        if row := _row(ways, goal):
            rows.append(row)
    if not rows:
        bound = {"under": f" for ${goal.bound:,.0f}", "by": f" in {goal.bound:g} hours"} if goal.bound else {}
        raise ConfigError(
            f"nothing on {config.cluster.scheduling_strategy} capacity in {config.gcp.location} that has a price "
            f"trains this{bound.get(goal.kind, '')}",
            expected="a bound that some machines meet",
            fix="raise it, or change cluster.scheduling_strategy, gcp.location or plan.prices_file",
        )
    today, without_today = _today(searches[0], goal)
    shown = tuple(row.shown for row in ordered(rows)[:most])
    return Suggestions(shown, tuple(left_out(base, load_catalog(), prices)), today, without_today)


def _today(search: Search, goal: Goal) -> tuple[Suggestion | None, str]:
    """The run file as it is, also where it does not fit or is not within the goal; or why it cannot be estimated."""
    config, catalog = search.config, load_catalog()
    cluster = config.cluster
    machine, gpu = catalog.machines.get(cluster.machine_type), catalog.gpus.get(cluster.accelerator_type)
    if machine is None or gpu is None:
        return None, f"{cluster.machine_type} {'is not in the catalogue' if machine is None else 'has no GPU'}"
    place = Cluster(machine, gpu, cluster.accelerator_count, cluster.replica_count)
    way = priced(search, goal, place, {}, config)
    if way is None:
        where = f"{cluster.scheduling_strategy} capacity in {config.gcp.location}"
        return None, f"no price or no time is known of {cluster.machine_type} on {where}"
    memory = estimate_memory(config, search.model, machine, gpu, load=search.load, nearest=False)
    return described(way, config, memory.total_bytes / GIB, fits=memory.fits), ""


def _with_sharded_frozen_weights(search: Search) -> Search | None:
    """Return the search with train.shard_frozen_weights, or None if it is set already or few weights are frozen."""
    shape, train = search.model.shape, search.config.train
    if train.shard_frozen_weights or 2 * shape.trainable_parameters > shape.total_parameters:
        return None
    config = search.config.model_copy(update={"train": train.model_copy(update={"shard_frozen_weights": True})})
    model = replace(search.model, shape=replace(shape, shards_frozen=True))
    memory = SearchMemory(model, search.load, cached=search.memory.cached)
    return replace(search, config=config, model=model, memory=memory, extra={"train.shard_frozen_weights": True})


def _row(ways: list[Candidate], goal: Goal) -> Fit | None:
    """The way that is shown of those on one machine."""

    def on(nodes: int) -> Fit | None:
        return chosen([way for way in ways if way.nodes == nodes], goal)

    row = chosen(ways, goal)
    return worth_its_nodes(row, on) if row and goal.kind in ("fastest", "under") else row
