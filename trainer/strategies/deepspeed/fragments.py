"""Where ZeRO keeps this rank's part of each parameter: a range of a flat partition of many parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vlmpipe.trainer.distributed.agreement import together
from vlmpipe.trainer.distributed.process import ProcessContext
from vlmpipe.trainer.errors import ConfigError
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


def agreed_updates(
    fragments: Mapping[str, Fragment], counts: Mapping[str, float], worker: ProcessContext
) -> dict[int, float]:
    """`updates_of` this rank's partitions. Collective: ranks have other parameters, and all raise the error of one."""
    return together(worker, "reading numbers of updates", lambda: updates_of(fragments, counts))


def updates_of(fragments: Mapping[str, Fragment], counts: Mapping[str, float]) -> dict[int, float]:
    """The number of AdamW's updates of each partition, from those of the parameters that a checkpoint has.

    AdamW corrects moments by their number of updates, and a partition has one. Raises ConfigError where the parameters
    of a partition have several, as those that had no gradient in some steps do under other strategies.
    """
    first: dict[int, str] = {}
    for name, fragment in fragments.items():
        other = first.setdefault(fragment.partition, name)
        if counts[name] != counts[other]:
            raise ConfigError(
                f"the checkpoint has {counts[other]:.0f} updates of {other} and {counts[name]:.0f} of {name}, and "
                "DeepSpeed keeps one number for the parameters of a group",
                expected="a checkpoint whose parameters have equally many updates",
                fix="continue with the train.strategy that saved it",
            )
    return {partition: counts[name] for partition, name in first.items()}


def fragments_of(optimizer: object, trained: Mapping[str, nn.Parameter]) -> dict[str, Fragment]:
    """This rank's part of each trained parameter by name, without those of which it has none.

    Args:
        optimizer: of a DeepSpeed engine.
    """
    if hasattr(optimizer, "round_robin_bit16_offsets"):
        names = {id(parameter): name for name, parameter in trained.items()}
        fragments = dict(_in_stages_1_and_2(optimizer, names))
    elif hasattr(optimizer, "grad_position"):  # stages 1 and 2 have it too, of another form, where they offload
        fragments = {name: _in_stage_3(optimizer, parameter) for name, parameter in trained.items()}
    else:
        fragments = dict(_in_bf16_optimizer(trained))
    return {name: fragments[name] for name in trained if name in fragments and fragments[name].numel > 0}


def _in_stage_3(optimizer: Any, parameter: Any) -> Fragment:
    """Each parameter is cut into equal slices, of which the last is padded and those after it are padding alone."""
    partition, offset, size = optimizer.grad_position[optimizer.get_param_id(parameter)]
    start = optimizer._get_param_partition_rank(parameter) * size
    numel = min(size, parameter.ds_numel - start)
    return Fragment(torch.Size(parameter.ds_shape), start, numel, partition, offset)


def _in_stages_1_and_2(optimizer: Any, names: Mapping[int, str]) -> Iterator[tuple[str, Fragment]]:
    """The parameters of a group, one after the other, are cut into equal partitions.

    Not by DeepSpeed's own mapping, which is wrong where `round_robin_gradients` has changed their order.
    """
    for group, parameters in enumerate(optimizer.round_robin_bit16_groups):
        size = optimizer.single_partition_of_fp32_groups[group].numel()
        begin = dist.get_rank(optimizer.real_dp_process_group[group]) * size
        for parameter, at in zip(parameters, optimizer.round_robin_bit16_offsets[group], strict=True):
            start, end = max(at, begin), min(at + parameter.numel(), begin + size)
            yield names[id(parameter)], Fragment(parameter.shape, start - at, end - start, group, start - begin)


def _in_bf16_optimizer(trained: Mapping[str, nn.Parameter]) -> Iterator[tuple[str, Fragment]]:
    """Like stages 1 and 2, in DeepSpeed's optimizer for stage 1 in bf16."""
    parameter: Any  # with DeepSpeed's attributes
    for name, parameter in trained.items():
        if mapping := parameter._hp_mapping:
            at, place = mapping.lp_fragment_address, mapping.hp_fragment_address.start
            yield name, Fragment(parameter.shape, at.start, at.numel, mapping.param_group_index, place)
