"""Copies of the model in a job: each rank belongs to one, and each copy's rows are counted once."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vlmpipe.trainer.config.optimizer import OptimizerConfig
from vlmpipe.trainer.config.train import TrainConfig
from vlmpipe.trainer.distributed.data_parallel_rank import DataParallelRank, replica_of
from vlmpipe.trainer.distributed.process import ProcessContext
from vlmpipe.trainer.errors import ConfigError

powers = st.sampled_from((1, 2, 4))


def train_config(tensor: int, stages: int) -> TrainConfig:
    return TrainConfig.model_construct(
        tensor_parallel=tensor,
        pipeline_parallel=stages,
        global_batch_size=1,
        optimizer=OptimizerConfig(learning_rate=1e-3),
    )


def replicas(tensor: int, stages: int, nodes: int, per_node: int) -> list[DataParallelRank]:
    config, world = train_config(tensor, stages), nodes * per_node
    workers = (ProcessContext(rank, world, rank % per_node, per_node, torch.device("cpu")) for rank in range(world))
    return [replica_of(config, worker) for worker in workers]


@given(tensor=powers, stages=powers, copies_of_nodes=powers, wider=powers)
def test_copies_are_equally_large_each_led_by_one_rank(
    tensor: int, stages: int, copies_of_nodes: int, wider: int
) -> None:
    found = replicas(tensor, stages, nodes=stages * copies_of_nodes, per_node=tensor * wider)
    assert {replica.count for replica in found} == {copies_of_nodes * wider}
    assert set(Counter(replica.index for replica in found).items()) == {
        (index, tensor * stages) for index in range(copies_of_nodes * wider)
    }
    assert Counter(replica.index for replica in found if replica.leads) == dict.fromkeys(
        range(copies_of_nodes * wider), 1
    )


@given(tensor=powers, stages=powers, wider=powers)
def test_neighbouring_ranks_split_layers_together(tensor: int, stages: int, wider: int) -> None:
    found = replicas(tensor, stages, nodes=stages, per_node=tensor * wider)
    groups: dict[int, set[int]] = defaultdict(set)
    for rank, replica in enumerate(found):
        groups[rank // tensor].add(replica.index)
    assert all(len(indices) == 1 for indices in groups.values())


@given(context=powers, groups=powers, nodes=powers)
def test_neighbours_share_sequences_and_each_has_a_part(context: int, groups: int, nodes: int) -> None:
    config = TrainConfig.model_construct(context_parallel=context)
    per_node, world = context * groups, context * groups * nodes
    workers = [ProcessContext(rank, world, rank % per_node, per_node, torch.device("cpu")) for rank in range(world)]
    found = [replica_of(config, worker) for worker in workers]
    assert [(one.index, one.part) for one in found] == [divmod(rank, context) for rank in range(world)]
    assert {(one.count, one.parts) for one in found} == {(groups * nodes, context)}
    assert sum(one.leads for one in found) == groups * nodes and all(one.takes_images for one in found)


@pytest.mark.parametrize(("tensor", "nodes", "per_node"), [(2, 1, 3), (4, 2, 2), (2, 2, 1)])
def test_tensor_parallelism_stays_inside_a_node(tensor: int, nodes: int, per_node: int) -> None:
    with pytest.raises(ConfigError, match="tensor parallelism inside a node"):
        replicas(tensor, 1, nodes, per_node)
