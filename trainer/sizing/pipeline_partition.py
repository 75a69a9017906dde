"""Partitions a model into pipeline stages. Imports no torch: the planner partitions by the same rule."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.sizing.flops import SequenceFlops


@dataclass(frozen=True)
class Costs:
    """FLOPs of one sequence, forward and backward: of each language layer, and of everything before and after them."""

    before: float
    layer: float
    after: float

    @classmethod
    def of(cls, flops: SequenceFlops, layers: int) -> Costs:
        in_layers = flops.language_layers.total + flops.adapters.total + flops.attention.total
        return cls(flops.tower.total + flops.projector.total, in_layers / layers, flops.head.total)


EVEN = Costs(0.0, 1.0, 0.0)


@functools.lru_cache
def stages_of(layers: int, stages: int, flops: SequenceFlops | None, *, image_layers: int) -> tuple[Stage, ...]:
    """The stages of a model, balanced by the FLOPs of a mean sequence; None takes the ends as free.

    The first stage has at least the first `image_layers` layers, because images are added after each and only the first
    stage has images. Raises ConfigError when there are fewer layers than stages need.
    """
    if layers < stages:
        raise ConfigError(
            f"{stages} stages (train.pipeline_parallel, times train.virtual_stages) are more than the language model's "
            f"{layers} layers",
            expected="a layer or more for each stage",
        )
    in_first = min(image_layers, layers)
    most = 1 + layers - max(1, in_first)
    if most < stages:
        raise ConfigError(
            f"{stages} stages (train.pipeline_parallel, times train.virtual_stages) are more than the language model's "
            f"{layers} layers give, of which the first {in_first} stay in one stage: outputs of the tower's inner "
            "layers are added after them (DeepStack)",
            expected=f"at most {most} stages",
        )
    return cut(layers, stages, Costs.of(flops, layers) if flops else EVEN, in_first=in_first)


def cut(layers: int, stages: int, costs: Costs, *, in_first: int = 0) -> tuple[Stage, ...]:
    """Stages that minimize the cost of the most expensive one. The first has at least `in_first` layers.

    Ties go to the partition with fewer layers in earlier stages, which hold more micro-batches at a time.
    """
    counts, loads = [0] * stages, end_costs(stages, costs)
    counts[0], loads[0] = in_first, loads[0] + in_first * costs.layer
    for _ in range(layers - in_first):
        # Layers cost the same, so adding each to the cheapest stage minimizes the maximum.
        cheapest = min(reversed(range(stages)), key=loads.__getitem__)
        counts[cheapest] += 1
        loads[cheapest] += costs.layer
    return tuple(
        Stage(range(sum(counts[:number]), sum(counts[: number + 1])), number == 0, number == stages - 1)
        for number in range(stages)
    )


def schedule_passes(micro_batches: int, ranks: int, virtual_stages: int) -> int:
    """Micro-batches of a schedule, padded with empty ones: at least one for each rank, and in an interleaved schedule
    rounds of equal length."""
    passes = max(micro_batches, ranks)
    while virtual_stages > 1 and passes % (passes // ranks):
        passes += 1
    return passes


def end_costs(stages: int, costs: Costs) -> list[float]:
    """FLOPs of a sequence in each stage without its layers."""
    return [costs.before * (number == 0) + costs.after * (number == stages - 1) for number in range(stages)]


@dataclass(frozen=True)
class Stage:
    """Some language layers of a model, and perhaps an end of it."""

    layers: Sequence[int]  # may be empty at the ends
    is_first: bool  # has the tower, the projector and the embedding
    is_last: bool  # has the final norm, the head and the loss

    @classmethod
    def whole(cls, layers: int) -> Stage:
        return cls(range(layers), is_first=True, is_last=True)

    @classmethod
    def joined(cls, stages: Sequence[Stage]) -> Stage:
        """Several stages as one."""
        layers = tuple(number for stage in stages for number in stage.layers)
        return cls(layers, any(stage.is_first for stage in stages), any(stage.is_last for stage in stages))
