"""Search space of `vlmpipe plan --suggest`: clusters, strategies with their degrees, micro-batches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from vlmpipe.catalog.machines import Catalog, Gpu, Machine
from vlmpipe.catalog.prices import Prices
from vlmpipe.config.run_config import RunConfig
from vlmpipe.planner.model_architecture import Architecture, require_shardable, require_stages
from vlmpipe.planner.parallel_layout import STRATEGIES
from vlmpipe.trainer.config.strategies import (
    COMPILING,
    COMPUTING_IN_FLOAT8,
    GATHERED_IN_BF16,
    GATHERING,
    OFFLOADING,
    PIPELINE_PARALLEL,
    REDUCING_IN_BF16,
    SHARDING_FROZEN,
    SUMMING_IN_BF16,
    TENSOR_PARALLEL,
    sums_offloaded_in_bf16,
)
from vlmpipe.trainer.config.train import TrainConfig
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.sizing.deepspeed_config import requested_copy_ranks, with_node_copy
from vlmpipe.trainer.sizing.pipeline_partition import stages_of

NODES = (1, 2, 4, 8, 16)  # and on, where the run file has more
MAX_NODES = 512
MICRO_BATCH_SIZES = (1, 2, 4, 8)


@dataclass(frozen=True)
class Cluster:
    """`nodes` machines with `gpus_per_node` GPUs each."""

    machine: Machine
    gpu: Gpu
    gpus_per_node: int
    nodes: int

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    def change(self, base: RunConfig) -> dict[str, object]:
        """Fields of the run file."""
        disks, disk = self.machine.boot_disk_types, base.cluster.boot_disk_type
        every_gpu = {} if base.cluster.processes_per_replica == "auto" else {"cluster.processes_per_replica": "auto"}
        return every_gpu | {
            "cluster.machine_type": self.machine.machine_type,
            "cluster.accelerator_type": self.gpu.accelerator_type,
            "cluster.accelerator_count": self.gpus_per_node,
            "cluster.replica_count": self.nodes,
            "cluster.boot_disk_type": disk if disk in disks else disks[0],
            "cluster.reduction_server": None,
            "cluster.restart_job_on_worker_restart": self.nodes > 1 or base.cluster.restart_job_on_worker_restart,
        }


def node_counts(config: RunConfig) -> tuple[int, ...]:
    """Numbers of nodes to compare: powers of two up to 16, or up to what the run file asks for."""
    largest = min(MAX_NODES, max(NODES[-1], config.cluster.replica_count))
    return tuple(2**power for power in range(largest.bit_length()))


def clusters(config: RunConfig, catalog: Catalog, prices: Prices) -> Iterator[Cluster]:
    """Clusters that are sold in the run file's region and term, support its precision and have a price."""
    region, term = config.gcp.location, config.cluster.scheduling_strategy
    for machine, gpu, count in _sold(config, catalog):
        if prices.machine(machine.machine_type, gpu.accelerator_type, count, region, term).usd_per_hour is not None:
            yield from (Cluster(machine, gpu, count, nodes) for nodes in node_counts(config))


def left_out(config: RunConfig, catalog: Catalog, prices: Prices) -> Iterator[str]:
    """Machines that are sold there and are not compared, with why: no price is known, or they need a reservation."""
    region, term = config.gcp.location, config.cluster.scheduling_strategy
    for machine, gpu, count in _sold(config, catalog):
        quote = prices.machine(machine.machine_type, gpu.accelerator_type, count, region, term)
        if quote.usd_per_hour is None:
            yield f"{machine.machine_type} ({count} x {gpu.accelerator_type}): no price is known on {term} in {region}"
    for machine in catalog.machines.values():
        if machine.needs_reservation and any(
            region in catalog.regions.get(accelerator_type, ()) for accelerator_type in machine.accelerators
        ):
            yield f"{machine.machine_type}: needs a reservation"


def _sold(config: RunConfig, catalog: Catalog) -> Iterator[tuple[Machine, Gpu, int]]:
    """Machines, with kind and number of their GPUs, that the run's region, term and precision allow."""
    region, term = config.gcp.location, config.cluster.scheduling_strategy
    for machine in catalog.machines.values():
        sold = {"spot": machine.spot, "standard": machine.on_demand, "flex_start": True}[term]
        if machine.needs_reservation or not sold:
            continue
        for accelerator_type, counts in machine.accelerators.items():
            gpu = catalog.gpus[accelerator_type]
            in_region = region in catalog.regions.get(accelerator_type, ())
            usable = gpu.bf16_tflops is not None or config.train.compute_type != "bf16"
            usable &= gpu.has_float8 or config.train.float8 == "none"
            if in_region and usable and (gpu.flex_start or term != "flex_start"):
                yield from ((machine, gpu, count) for count in counts)


@dataclass(frozen=True)
class Degrees:
    """Degrees of tensor and pipeline parallelism that the trainer supports for this model."""

    tensor: frozenset[int]
    pipeline: frozenset[int]

    @classmethod
    def of(cls, model: Architecture, places: Iterable[Cluster], *, cached: bool, sequence: bool = False) -> Degrees:
        """All degrees that some cluster has GPUs for and the trainer's checks accept."""
        places = list(places)
        layers, in_first = model.shape.language.layers, model.shape.image_layers

        def require_stages_of(stages: int) -> None:
            stages_of(layers, stages, None, image_layers=in_first)
            require_stages(model.model)

        return cls(
            # Inside a node only, as in the trainer: each layer waits for four exposed sums, which take ten times as
            # long between nodes.
            tensor=_accepted(
                {degree for place in places for degree in _divisors(place.gpus_per_node)},
                lambda ranks: require_shardable(model.model, ranks, cached=cached, sequence=sequence),
            ),
            pipeline=_accepted(
                {degree for place in places for degree in _divisors(place.gpus)},
                require_stages_of,
            ),
        )


WITHOUT_CHECKPOINTING = {
    "train.activation_checkpointing": "none",
    "train.tower_activation_checkpointing": False,
    "train.activation_offloading": False,
}


def candidates(config: RunConfig, cluster: Cluster, degrees: Degrees) -> Iterator[dict[str, object]]:
    """All strategies, degrees and micro-batches on the cluster, as fields of the run file.

    Without activation checkpointing, which makes a candidate slower.
    """
    train = config.train
    for strategy, tensor, pipeline in _strategies(cluster, degrees):
        copies = cluster.gpus // (tensor * pipeline)
        if strategy == "hsdp" and cluster.nodes == 1:
            continue  # this is fsdp then
        change: dict[str, object] = {"train.strategy": strategy}
        if tensor != train.tensor_parallel:
            change["train.tensor_parallel"] = tensor
        if pipeline != train.pipeline_parallel:
            change["train.pipeline_parallel"] = pipeline
        if train.context_parallel > 1:
            change["train.context_parallel"] = 1  # the search raises it where memory asks for it
        if train.virtual_stages > 1:
            change["train.virtual_stages"] = 1  # needs the least memory
        if train.offload != "none" and strategy not in OFFLOADING[train.offload]:
            change["train.offload"] = "none"
        change |= _number_types(train, strategy)
        if train.shard_frozen_weights and strategy not in SHARDING_FROZEN:
            change["train.shard_frozen_weights"] = False
        if requested_copy_ranks(train):
            ranks = cluster.gpus_per_node if strategy == "zero3" else 0
            change["train.deepspeed"] = with_node_copy(train, ranks)
        if train.compile == "on" and strategy not in COMPILING:
            change["train.compile"] = "auto"
        if train.float8 != "none" and strategy not in COMPUTING_IN_FLOAT8:
            change["train.float8"] = "none"
        if train.sequence_parallel and (strategy not in TENSOR_PARALLEL or config.data.sequence_length % tensor):
            change["train.sequence_parallel"] = False
        if strategy not in GATHERING:
            if train.reshard_after_forward != "auto":
                change["train.reshard_after_forward"] = "auto"
            if train.prefetch_layers > 1:
                change["train.prefetch_layers"] = 1
        for size in MICRO_BATCH_SIZES:
            if train.global_batch_size % (copies * size):
                continue
            yield change | {"train.micro_batch_size": size} | WITHOUT_CHECKPOINTING


def _number_types(train: TrainConfig, strategy: str) -> dict[str, object]:
    """Changes without which the strategy is refused: see `vlmpipe.trainer.config.precision`."""
    change: dict[str, object] = {}
    if train.precision == "bf16-autocast" and strategy in GATHERED_IN_BF16:
        change["train.precision"] = "bf16"
    if train.gradient_accumulation_dtype == "bf16" and strategy not in SUMMING_IN_BF16:
        change["train.gradient_accumulation_dtype"] = "fp32"
    if train.reduce_dtype == "bf16" and strategy not in REDUCING_IN_BF16:
        change["train.reduce_dtype"] = "fp32"
    if sums_offloaded_in_bf16(train.precision, train.offload, strategy):
        change["train.gradient_accumulation_dtype"] = "bf16"
    return change


def _strategies(cluster: Cluster, degrees: Degrees) -> Iterator[tuple[str, int, int]]:
    """Strategies with their degrees of tensor and pipeline parallelism."""
    for strategy in STRATEGIES:
        tensor = [ranks for ranks in _divisors(cluster.gpus_per_node) if ranks in degrees.tensor]
        if strategy in PIPELINE_PARALLEL:
            tensor = tensor[-1:]  # the most: fewer ranks lie between this and stages alone
        for ranks in tensor if strategy in TENSOR_PARALLEL else [1]:
            pipeline = [stages for stages in _divisors(cluster.gpus // ranks) if stages in degrees.pipeline]
            for stages in pipeline if strategy in PIPELINE_PARALLEL else [1]:
                yield strategy, ranks, stages


def _divisors(gpus: int) -> list[int]:
    """Divisors above 1."""
    return [ranks for ranks in range(2, gpus + 1) if gpus % ranks == 0]


def _accepted(degrees: Iterable[int], check: Callable[[int], object]) -> frozenset[int]:
    accepted = set()
    for degree in degrees:
        with contextlib.suppress(ConfigError):
            check(degree)
            accepted.add(degree)
    return frozenset(accepted)
