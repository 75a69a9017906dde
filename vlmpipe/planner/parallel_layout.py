"""How each strategy distributes a training step over ranks: what is replicated and what is sharded."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from vlmpipe.config.run_config import RunConfig
from vlmpipe.trainer.config.strategies import CONTEXT_PARALLEL
from vlmpipe.trainer.sizing.deepspeed_config import node_copy_ranks

SHARDED_BY_FSDP = ("fsdp", "hsdp", "tp", "pp", "tp+pp+dp")


@dataclass(frozen=True)
class Layout:
    """A strategy on `nodes` x `ranks_per_node` ranks.

    A model replica takes `tensor_parallel` x `pipeline_parallel` ranks; `context_parallel` replicas share sequences.
    Weights, gradients and optimizer state may also be sharded over replicas: `weight_shards` ranks hold one set of
    weights, and so on; 1 means not sharded.
    """

    strategy: str
    nodes: int
    ranks_per_node: int
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    virtual_stages: int = 1  # on each rank of a pipeline
    context_parallel: int = 1
    weight_shards: int = 1
    gradient_shards: int = 1
    optimizer_shards: int = 1
    copy_shards: int = 0  # ranks of a node that share one more copy of all weights (hpZ); 0 for none

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def model_ranks(self) -> int:
        """Ranks of one model replica."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def stages(self) -> int:
        """Pipeline stages: rank r of a pipeline of p ranks has stages r, r + p, ..."""
        return self.pipeline_parallel * self.virtual_stages

    @property
    def replicas(self) -> int:
        """Model replicas, whose gradients are summed."""
        return self.world_size // self.model_ranks

    @property
    def data_parallel(self) -> int:
        """Groups of `context_parallel` replicas, each with its own packed sequences."""
        return self.replicas // self.context_parallel


_ALL = ("weight_shards", "gradient_shards", "optimizer_shards")
STRATEGIES: dict[str, tuple[str, ...]] = {  # what is sharded: by hsdp inside a node, by the others over all replicas
    "ddp": (),
    "zero1": ("optimizer_shards",),
    "zero2": ("gradient_shards", "optimizer_shards"),
    "zero3": _ALL,
    "fsdp": _ALL,
    "hsdp": _ALL,
    "tp": _ALL,
    "pp": _ALL,
    "tp+pp+dp": _ALL,
}


def layout_of(config: RunConfig) -> Layout:
    """The layout that the run file asks for."""
    cluster = config.cluster
    return make_layout(
        config.train.strategy,
        cluster.replica_count,
        cluster.processes,
        tensor_parallel=config.train.tensor_parallel,
        pipeline_parallel=config.train.pipeline_parallel,
        virtual_stages=config.train.virtual_stages,
        context_parallel=config.train.context_parallel,
        copy_ranks=node_copy_ranks(config.train, nodes=cluster.replica_count, node_ranks=cluster.processes),
    )


def more_context_parallel(config: RunConfig, heads: int) -> list[dict[str, int]]:
    """Changes to higher degrees of context parallelism that work inside a node, the lowest first. heads: of the
    language model."""
    train = config.train
    if train.strategy not in CONTEXT_PARALLEL:
        return []
    shareable = math.gcd(config.cluster.processes, config.data.sequence_length, heads)
    degrees = range(train.context_parallel + 1, shareable + 1)
    return [{"train.context_parallel": degree} for degree in degrees if shareable % degree == 0]


def make_layout(
    strategy: str,
    nodes: int,
    ranks_per_node: int,
    *,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    virtual_stages: int = 1,
    context_parallel: int = 1,
    copy_ranks: int = 0,
) -> Layout:
    """Raises KeyError for a strategy that is not in STRATEGIES; the ranks must divide by the model's."""
    degrees = (tensor_parallel, pipeline_parallel, virtual_stages)
    bare = Layout(strategy, nodes, ranks_per_node, *degrees, context_parallel=context_parallel)
    assert bare.world_size % (bare.model_ranks * context_parallel) == 0, bare
    if copy_ranks and strategy == "zero3":
        bare = replace(bare, copy_shards=copy_ranks)
    in_node = ranks_per_node // min(bare.model_ranks, ranks_per_node)
    shards = in_node if strategy == "hsdp" else bare.replicas
    sharded: dict[str, Any] = dict.fromkeys(STRATEGIES[strategy], shards)
    return replace(bare, **sharded)
