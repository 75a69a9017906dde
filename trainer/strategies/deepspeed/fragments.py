"""Where ZeRO keeps this rank's part of each parameter: a range of a flat partition of many parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vlmpipe.trainer.strategies.tensor_pieces import TensorPieces, pieces_of_range


@dataclass(frozen=True)
class Fragment:
    """A range of a flattened parameter, and where it is in this rank's partitions of weights, moments or averages."""

    shape: torch.Size  # of the whole parameter
    start: int  # first element, of the flattened parameter
    numel: int
    partition: int
    offset: int  # first element, of the partition

    def of(self, partitions: Sequence[Tensor]) -> TensorPieces:
        """The range in one of these partitions, whose memory it shares."""
        flat = partitions[self.partition].detach()[self.offset : self.offset + self.numel]
        return pieces_of_range(self.shape, self.start, flat)


def fragments_of(optimizer: Any, trained: Mapping[str, nn.Parameter]) -> dict[str, Fragment]:
    """This rank's part of each trained parameter by name, without those of which it has none.

    Args:
        optimizer: of a DeepSpeed engine.
    """
    fragment_of = _of_stage_3 if hasattr(optimizer, "fp32_partitioned_groups_flat") else _of_stages_1_and_2
    fragments = {name: fragment_of(optimizer, parameter) for name, parameter in trained.items()}
    return {name: fragment for name, fragment in fragments.items() if fragment and fragment.numel > 0}


def _of_stage_3(optimizer: Any, parameter: Any) -> Fragment:
    """Each parameter is cut into equal slices, of which the last is padded and those after it are padding alone."""
    partition, offset, size = optimizer.grad_position[optimizer.get_param_id(parameter)]
    start = optimizer._get_param_partition_rank(parameter) * size
    numel = min(size, parameter.ds_numel - start)
    return Fragment(torch.Size(parameter.ds_shape), start, numel, partition, offset)


def _of_stages_1_and_2(_: Any, parameter: Any) -> Fragment | None:
    """The parameters of a group, one after the other, are cut into equal partitions."""
    mapping = parameter._hp_mapping
    if mapping is None:
        return None
    start, numel = mapping.lp_fragment_address.start, mapping.lp_fragment_address.numel
    return Fragment(parameter.shape, start, numel, mapping.param_group_index, mapping.hp_fragment_address.start)
