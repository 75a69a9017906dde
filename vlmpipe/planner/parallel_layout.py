"""How each strategy distributes a training step over ranks: what is replicated and what is sharded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from trainer.sizing.deepspeed_config import uses_hpz
from vlmpipe.config.run_config import RunConfig

SHARDED_BY_FSDP = ("fsdp", "hsdp", "tp", "pp", "tp+pp+dp")


@dataclass(frozen=True)
class Layout:
    """A strategy on `nodes` x `ranks_per_node` ranks.

    A model replica takes `tensor_parallel` x `pipeline_parallel` ranks. Over the replicas, weights, gradients and
    optimizer state may be split again: `weight_shards` ranks hold one whole set of weights, and so on; 1 is no split.
    """

    strategy: str
    nodes: int
    ranks_per_node: int
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    virtual_stages: int = 1  # on each rank of a pipeline
    weight_shards: int = 1
    gradient_shards: int = 1
    optimizer_shards: int = 1
    copy_shards: int = 0  # ranks of a node that share one more copy of all weights; 0 where there is none

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def model_ranks(self) -> int:
        """Ranks that together hold one replica's layers."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def stages(self) -> int:
        """Parts of the model across its depth: rank r of a pipeline of p has number r, r + p, ..."""
        return self.pipeline_parallel * self.virtual_stages

    @property
    def data_parallel(self) -> int:
        """Replicas, each with rows of its own."""
        return self.world_size // self.model_ranks


def _sharded(weights: bool, gradients: bool, optimizer: bool) -> Callable[[Layout], Layout]:
    def apply(layout: Layout) -> Layout:
        replicas = layout.data_parallel
        return replace(
            layout,
            weight_shards=replicas if weights else 1,
            gradient_shards=replicas if gradients else 1,
            optimizer_shards=replicas if optimizer else 1,
        )

    return apply


def _hybrid(layout: Layout) -> Layout:
    """Sharded inside a node, replicated across nodes."""
    shards = layout.ranks_per_node // min(layout.model_ranks, layout.ranks_per_node)
    return replace(layout, weight_shards=shards, gradient_shards=shards, optimizer_shards=shards)


STRATEGIES: dict[str, Callable[[Layout], Layout]] = {
    "ddp": _sharded(False, False, False),
    "zero1": _sharded(False, False, True),
    "zero2": _sharded(False, True, True),
    "zero3": _sharded(True, True, True),
    "fsdp": _sharded(True, True, True),
    "hsdp": _hybrid,
    "tp": _sharded(True, True, True),
    "pp": _sharded(True, True, True),
    "tp+pp+dp": _sharded(True, True, True),
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
        node_weights=config.train.zero_hpz,
    )


def make_layout(
    strategy: str,
    nodes: int,
    ranks_per_node: int,
    *,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    virtual_stages: int = 1,
    node_weights: bool = False,
) -> Layout:
    """Raises KeyError for a strategy that is not in STRATEGIES; the ranks must divide by the model's."""
    bare = Layout(strategy, nodes, ranks_per_node, tensor_parallel, pipeline_parallel, virtual_stages)
    assert bare.world_size % bare.model_ranks == 0, bare
    if node_weights and strategy == "zero3" and uses_hpz(nodes=nodes, node_ranks=ranks_per_node):
        bare = replace(bare, copy_shards=ranks_per_node)
    return STRATEGIES[strategy](bare)
