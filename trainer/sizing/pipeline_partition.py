"""Partitions a model into pipeline stages. No torch here: the planner partitions by the same rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainer.errors import ConfigError
from trainer.sizing.flops import SequenceFlops


@dataclass(frozen=True)
class Costs:
    """FLOPs of one row, forward and backward: of each language layer, and of what lies before and after them."""

    before: float
    layer: float
    after: float

    @classmethod
    def of(cls, row: SequenceFlops, layers: int) -> Costs:
        """`layers` is how many language layers the row goes through."""
        in_layers = row.language_layers.total + row.adapters.total + row.attention.total
        return cls(row.tower.total + row.projector.total, in_layers / layers, row.head.total)


EVEN = Costs(0.0, 1.0, 0.0)


def stages_of(layers: int, stages: int, row: SequenceFlops | None, *, image_layers: int) -> list[Stage]:
    """The stages of a model for rows like `row`; None takes all layers as equal and the ends as free.

    Behind the first `image_layers` of its layers images are added, which only the first stage has, so it has these.
    Raises ConfigError when there are fewer layers than stages need.
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
            "layers are added behind them (DeepStack)",
            expected=f"at most {most} stages",
        )
    return cut(layers, stages, Costs.of(row, layers) if row else EVEN, in_first=in_first)


def cut(layers: int, stages: int, costs: Costs, *, in_first: int = 0) -> list[Stage]:
    """Stages of which the one that costs most costs as little as possible. The first has at least `in_first` layers.

    Of equal cuts, the one with fewer layers in earlier stages: these hold more micro-batches at a time.
    """
    counts, loads = [0] * stages, end_costs(stages, costs)
    counts[0], loads[0] = in_first, loads[0] + in_first * costs.layer
    for _ in range(layers - in_first):
        # Layers are alike, so putting each where the load is least gives the least largest load.
        cheapest = min(reversed(range(stages)), key=loads.__getitem__)
        counts[cheapest] += 1
        loads[cheapest] += costs.layer
    return [
        Stage(range(sum(counts[:number]), sum(counts[: number + 1])), number == 0, number == stages - 1)
        for number in range(stages)
    ]


def schedule_passes(micro_batches: int, ranks: int, virtual_stages: int) -> int:
    """Micro-batches that a schedule needs for these, the rest of them empty: one for each rank, and of an interleaved
    one rounds of equal length."""
    passes = max(micro_batches, ranks)
    while virtual_stages > 1 and passes % (passes // ranks):
        passes += 1
    return passes


def end_costs(stages: int, costs: Costs) -> list[float]:
    """FLOPs of a row in each stage without its layers."""
    return [costs.before * (number == 0) + costs.after * (number == stages - 1) for number in range(stages)]


@dataclass(frozen=True)
class Stage:
    """A part of a model that is cut across its depth: some language layers, and perhaps an end of the model."""

    layers: Sequence[int]  # may be empty at the ends
    is_first: bool  # has the tower, the projector and the embedding
    is_last: bool  # has the final norm, the head and the loss

    @classmethod
    def whole(cls, layers: int) -> Stage:
        """Of a model that is not cut."""
        return cls(range(layers), is_first=True, is_last=True)

    @classmethod
    def joined(cls, stages: Sequence[Stage]) -> Stage:
        """All that several stages have."""
        layers = tuple(number for stage in stages for number in stage.layers)
        return cls(layers, any(stage.is_first for stage in stages), any(stage.is_last for stage in stages))
