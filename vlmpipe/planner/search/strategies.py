"""`vlmpipe plan --strategies`: every strategy on the run file's machines, on one node and on several.

Each with the degrees, the micro-batch and the activation checkpointing that are fastest among those that fit; stages
have micro-batches of one sequence. Only training is looked at: jobs beside it do not depend on the strategy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from vlmpipe.catalog.machines import load_catalog
from vlmpipe.catalog.prices import Prices
from vlmpipe.config.run_config import RunConfig
from vlmpipe.planner.memory.rank import GIB
from vlmpipe.planner.model_architecture import Architecture
from vlmpipe.planner.search.space import Cluster, Degrees
from vlmpipe.planner.search.ways import (
    Goal,
    Search,
    Suggestion,
    changed,
    chosen,
    less_memory,
    of_training,
    priced,
    search_of,
    settings_on,
)
from vlmpipe.planner.workload import Workload
from vlmpipe.trainer.errors import ConfigError

NODES = (1, 2, 4, 8)
# zero1 lies between ddp and zero2, and zero3 sends what fsdp does.
COMPARED = ("ddp", "zero2", "fsdp", "hsdp", "tp", "pp", "tp+pp+dp")


@dataclass(frozen=True)
class Cell:
    """A strategy on a number of nodes. With none of the three it is not possible there, such as hsdp on one node."""

    strategy: str
    nodes: int
    way: Suggestion | None = None  # the fastest that fits
    min_gib: float | None = None  # that a GPU needs at least, where nothing fits
    lacks_host_memory: bool = False  # GPUs have room, and the machine's own memory has not


@dataclass(frozen=True)
class Comparison:
    """All cells of one machine type."""

    machine: str
    gpu: str
    gpus_per_node: int
    gpu_memory_gib: float
    nic_gbps: float
    global_batch_size: int
    cells: tuple[Cell, ...]

    def as_dict(self) -> dict[str, object]:
        """For `plan --strategies --json`."""
        return asdict(self)

    def row(self, nodes: int) -> dict[str, Cell]:
        return {cell.strategy: cell for cell in self.cells if cell.nodes == nodes}

    def fastest(self, nodes: int) -> Cell | None:
        fitting = [cell for cell in self.row(nodes).values() if cell.way]
        return min(fitting, key=lambda cell: cell.way.hours if cell.way else 0.0, default=None)


def compare_strategies(
    config: RunConfig, model: Architecture, load: Workload, prices: Prices, nodes: Sequence[int] = NODES
) -> Comparison:
    """Raises ConfigError for a machine without GPUs or without a price, or if the number of steps is not known."""
    catalog, cluster = load_catalog(), config.cluster
    machine, gpu = catalog.machines.get(cluster.machine_type), catalog.gpus.get(cluster.accelerator_type)
    if machine is None or gpu is None:
        raise ConfigError(
            f"--strategies with {cluster.machine_type}, {'an unknown machine' if machine is None else 'without a GPU'}",
            expected="a machine with GPUs that the catalogue has",
            fix="set cluster.machine_type, accelerator_type and accelerator_count, such as a2-highgpu-8g, "
            "NVIDIA_TESLA_A100 and 8",
        )
    search = search_of(config, model, load, prices)
    places = [Cluster(machine, gpu, cluster.accelerator_count, count) for count in nodes]
    sequence = search.config.train.sequence_parallel
    degrees = Degrees.of(model, places, cached=search.memory.cached, sequence=sequence)
    cells = [cell for place in places for cell in _cells(search, place, degrees)]
    return Comparison(
        machine.machine_type,
        gpu.accelerator_type,
        cluster.accelerator_count,
        gpu.memory_gib,
        machine.nic_gbps,
        config.train.global_batch_size,
        tuple(cells),
    )


def _cells(search: Search, place: Cluster, degrees: Degrees) -> list[Cell]:
    goal, cells = Goal("fastest"), []
    by_strategy = defaultdict(list)
    for change, config in settings_on(search, place, degrees):
        if config.train.strategy not in COMPARED:
            continue
        if config.train.pipeline_parallel > 1 and config.train.micro_batch_size > 1:
            continue  # stages wait least with many small micro-batches, and each size takes traces of its own
        by_strategy[config.train.strategy].append((change, config))
    for strategy, tried in by_strategy.items():
        fitting = [
            (change, config)
            for change, config in tried
            if search.memory.min_bytes(config) <= place.gpu.memory_gib * GIB
        ]
        ways = [way for change, config in fitting if (way := priced(search, goal, place, change, config))]
        if fitting and not ways:
            where = f"{search.config.cluster.scheduling_strategy} capacity in {search.config.gcp.location}"
            raise ConfigError(
                f"no price or no time is known of {place.machine.machine_type} on {where}",
                expected="a machine with a price",
                fix="change cluster.scheduling_strategy or gcp.location, or give plan.prices_file",
            )
        fit = chosen(ways, goal, of_training)
        cells.append(Cell(strategy, place.nodes, fit.shown) if fit else _too_large(search, place, strategy, tried))
    return cells


def _too_large(search: Search, place: Cluster, strategy: str, tried: list[tuple[dict[str, object], RunConfig]]) -> Cell:
    """The least that a GPU would need: with all that saves activations, where there is room for them at all."""
    needs = []
    for _, config in tried:
        if (least := search.memory.min_bytes(config)) > place.gpu.memory_gib * GIB:
            needs.append(least)
            continue
        while change := less_memory(config, search.model.shape):
            config = changed(config, change)
        try:
            needs.append(search.memory.bytes(config))
        except ConfigError:  # the trainer would refuse it
            continue
    if not needs:
        return Cell(strategy, place.nodes)
    least = min(needs)
    if least <= place.gpu.memory_gib * GIB:
        return Cell(strategy, place.nodes, lacks_host_memory=True)
    return Cell(strategy, place.nodes, min_gib=least / GIB)
