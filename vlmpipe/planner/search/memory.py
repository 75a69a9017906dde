"""Memory of a candidate in a search: a lower bound without a trace, then an estimate from traces of small batches.

A trace takes half a second, the rest a millisecond. So candidates with the same computation share traces, and one that
is too large without activations needs none.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from vlmpipe.config.run_config import RunConfig
from vlmpipe.planner.memory.activations import Activations, Computing, activations, computing_of
from vlmpipe.planner.memory.components import MemoryPart
from vlmpipe.planner.memory.phases import run_phases
from vlmpipe.planner.memory.pipeline_partition import StageWeights, by_rank, planned_stages
from vlmpipe.planner.memory.pipeline_stage import stage_phases
from vlmpipe.planner.memory.rank import device_parts, fullest
from vlmpipe.planner.memory.stage_state import lasting_parts
from vlmpipe.planner.model_architecture import Architecture
from vlmpipe.planner.parallel_layout import Layout, layout_of
from vlmpipe.planner.workload import Workload

NOTHING = Activations({}, {}, {}, {}, 0)


@dataclass(frozen=True)
class SearchMemory:
    """Bytes of the fullest GPU, for candidates with the same model and workload."""

    model: Architecture
    load: Workload
    cached: bool
    _traces: dict[tuple[Computing, str, bool], tuple[Activations, Activations]] = field(default_factory=dict)
    _least: dict[tuple[Layout, str], int] = field(default_factory=dict)

    def min_bytes(self, config: RunConfig) -> int:
        """Lower bound of all candidates with this layout: without activations, and with one micro-batch a step."""
        layout = layout_of(config)
        key = (layout, config.train.offload)
        if key not in self._least:
            self._least[key] = self._without_activations(config, layout)
        return self._least[key]

    def bytes(self, config: RunConfig) -> int:
        """Return the bytes that a rank needs, with activations extrapolated from one and two sequences.

        Raises ConfigError for a model that cannot be split this way.
        """
        layout = layout_of(config)
        whole = config.model_copy(update={"model": self.model.model})
        if layout.pipeline_parallel > 1:
            return self._of_stages(whole, layout)
        train = config.train
        key = (computing_of(config), train.activation_checkpointing, train.tower_activation_checkpointing)
        if key not in self._traces:
            self._traces[key] = self._traced(whole, 1), self._traced(whole, 2)
        of_one, of_two = self._traces[key]
        held = of_one.of_sequences(config.train.micro_batch_size, of_two)
        return self._of_ranks(config, layout, held, _passes(config, layout))

    def _traced(self, config: RunConfig, sequences: int) -> Activations:
        train = config.train.model_copy(update={"micro_batch_size": sequences})
        return activations(config.model_copy(update={"train": train}), self.model.shape)

    def _without_activations(self, config: RunConfig, layout: Layout) -> int:
        if layout.pipeline_parallel > 1:
            stages = planned_stages(config, self.model.shape, layout, self.load, cached=self.cached)
            ranks, shards = layout.tensor_parallel, layout.weight_shards
            weights = [
                StageWeights.of(self.model.shape, stage, cached=self.cached, tensor_parallel=ranks)
                for stage in by_rank(stages, layout)
            ]
            return max(_on_device(lasting_parts([weight], shards, config.train), layout) for weight in weights)
        return self._of_ranks(config, layout, NOTHING, passes=1)

    def _of_ranks(self, config: RunConfig, layout: Layout, held: Activations, passes: int) -> int:
        moments = run_phases(config, self.model.shape, layout, held, cached=self.cached, passes=passes)
        return _on_device([part for part in fullest(moments)[1] if part.place == "device"], layout)

    def _of_stages(self, config: RunConfig, layout: Layout) -> int:
        shape, passes = self.model.shape, _passes(config, layout)
        stages = planned_stages(config, shape, layout, self.load, cached=self.cached)
        numbers: Iterable[int] = range(layout.pipeline_parallel)
        if layout.virtual_stages == 1 and not shape.chosen:
            # Of equal stages the first is fullest: it holds most micro-batches.
            kinds = [(len(stage.layers), stage.is_first, stage.is_last) for stage in stages]
            numbers = {kind: number for number, kind in reversed(list(enumerate(kinds)))}.values()
        return max(
            _on_device(parts, layout)
            for number in numbers
            for parts in stage_phases(config, shape, stages, number, passes=passes, from_one_sequence=True).values()
        )


def _passes(config: RunConfig, layout: Layout) -> int:
    return config.train.global_batch_size // (layout.data_parallel * config.train.micro_batch_size)


def _on_device(parts: list[MemoryPart], layout: Layout) -> int:
    return sum(part.bytes for part in [*parts, *device_parts(parts, layout)])
