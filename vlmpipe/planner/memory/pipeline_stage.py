"""Memory of pipeline stages, by component, at the peak phases of a training step.

In a 1F1B schedule stage s of S (from 0) holds min(S - s, micro-batches) micro-batches at a time, so the first one holds
most of them. Which stage is the fullest depends on what else lies in each. Where ranks have several stages, the order
of their passes says how many micro-batches of each are held.

FSDP gathers a stage's weights before its first forward pass and keeps them until its last backward pass. Gradients are
summed whole over micro-batches, then reduced group by group (`torch.distributed.pipelining`, `perform_reduce_grad`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from vlmpipe.config.run_config import RunConfig
from vlmpipe.planner.disk_cache import disk_cached
from vlmpipe.planner.memory.activations import largest_sequences, require_degree
from vlmpipe.planner.memory.components import MemoryPart
from vlmpipe.planner.memory.pipeline_partition import StageWeights
from vlmpipe.planner.memory.pipeline_schedule import Pass, operations
from vlmpipe.planner.memory.stage_state import StageGroups, lasting_parts
from vlmpipe.planner.parallel_layout import layout_of
from vlmpipe.planner.workload import is_cached
from vlmpipe.trainer.models.layers.recompute_policy import Recompute
from vlmpipe.trainer.sizing.model_shape import ModelShape
from vlmpipe.trainer.sizing.pipeline_partition import Stage, schedule_passes
from vlmpipe.trainer.sizing.trace_results import Compute, Held, StageTrace

Mix = tuple[int, int]  # images and label tokens of one row
Moment = Literal["forward", "backward", "reduction"]
GATHERED, WHOLE, SHARDS, REDUCED = "gathered weights", "whole gradients", "gradients", "gradients in flight"
NAMES = {
    "vision": ("vision tokens", "projected features, and the tower where it runs"),
    "language": ("activations", "held for the backward pass"),
    "head": ("logits", "of label tokens only, a chunk at a time"),
    "backward": ("backward temporaries", ""),
    "sent": ("sent", "between stages, not yet let go of"),
    GATHERED: (GATHERED, "the stage, whole, from its first forward to its last backward pass"),
    WHOLE: (WHOLE, "fp32, summed over micro-batches"),
    SHARDS: (SHARDS, "fp32, sharded"),
    REDUCED: (REDUCED, "one group's"),
}


def stage_phases(
    config: RunConfig,
    shape: ModelShape,
    stages: Sequence[Stage],
    number: int,
    *,
    passes: int,
    mixes: Sequence[Mix] = (),
    from_one_sequence: bool = False,
    on_gpu: bool = True,
) -> dict[str, list[MemoryPart]]:
    """All that torch allocates for what rank `number` of a pipeline has of `stages`, on each of the ranks that split
    it: in the forward pass, in the backward pass, in the reduction of gradients and in the update.

    Raises ConfigError for a model that train.tensor_parallel ranks cannot split.

    Args:
        passes: micro-batches of a step.
        mixes: what sequences may hold; the fullest counts. By default `largest_sequences`.
        from_one_sequence: trace a micro-batch of one sequence and take the others as its multiples, for a search.
    """
    require_degree(config)
    train = config.train
    ranks, virtual = train.pipeline_parallel, train.virtual_stages
    local_stages, shards = stages[number::ranks], layout_of(config).weight_shards
    weights = [
        StageWeights.of(shape, stage, cached=is_cached(config), tensor_parallel=train.tensor_parallel)
        for stage in local_stages
    ]
    groups = [
        StageGroups.of(config, stage, stage_weights, shards, on_gpu=on_gpu)
        for stage, stage_weights in zip(local_stages, weights, strict=True)
    ]
    # With one stage a rank, passes after the first backward pass hold the same, however many there are.
    order = list(operations(number, ranks, virtual, min(passes, ranks + 1) if virtual == 1 else passes))
    neighbours = [(not stage.is_first) + (not stage.is_last) for stage in local_stages]
    traced = [
        _Rank(
            [_Stage.traced(config, shape, stage, mix, from_one_sequence) for stage in local_stages],
            groups,
            neighbours,
            order,
        )
        for mix in mixes or largest_sequences(config, shape)
    ]
    rank = max(traced, key=lambda traced_rank: traced_rank.total_bytes)
    first_stage = rank.stages[0]
    # What is received has a buffer for each micro-batch: hidden states from before, their gradients from after.
    in_schedule = schedule_passes(passes, ranks, virtual)
    late = 0  # with several stages, `_Rank` counts it
    if virtual == 1:
        # What was sent is let go of late: the last gradient, and the output of the last but one forward pass of the
        # start. A micro-batch that the schedule has too many is an output of zeros.
        (stage,), held = local_stages, min(ranks - number, passes)
        late = (not stage.is_first and passes > held) + (not stage.is_last and passes >= 2 * held - 1)
        late += min(ranks - number, in_schedule) - held
    sent = MemoryPart("sent", late * first_stage.passed_on_bytes, NAMES["sent"][1])
    static = [
        *lasting_parts(weights, shards, config.train),
        MemoryPart("inputs", passes * first_stage.input_bytes, "tokens, labels and images of a step"),
        MemoryPart(
            "received",
            in_schedule * sum(neighbours) * first_stage.passed_on_bytes,
            "between stages, for each micro-batch of a step",
        ),
    ]
    moments: dict[str, list[MemoryPart]] = {moment: [*parts_of(held), sent] for moment, held in rank.fullest.items()}
    moments["step"] = parts_of(Counter({SHARDS: sum(group.sharded_bytes for group in groups)}))
    return {moment: [part for part in [*static, *parts] if part.bytes] for moment, parts in moments.items()}


@dataclass(frozen=True)
class _Stage:
    """Bytes by category, of one micro-batch of one mix."""

    forward: Counter[str]
    saved: Counter[str]
    backward: Counter[str]
    passed_on_bytes: int
    input_bytes: int

    @classmethod
    def traced(cls, config: RunConfig, shape: ModelShape, stage: Stage, mix: Mix, from_one_sequence: bool) -> _Stage:
        """Layers are equal, so traces of one and of two of them give any number. Where patterns choose what is trained
        they are not, and all are traced.

        Before these come the layers after which images are added, and the one during which the library still holds
        what the last of them gave.
        """
        layers, rows = len(stage.layers), config.train.micro_batch_size
        differ = config.model.has_patterns
        few = layers if differ else min(layers, shape.image_layers + 2 if stage.is_first and shape.image_layers else 1)
        traced_sequences = 1 if from_one_sequence else rows
        times = rows // traced_sequences
        shallow, deeper = (
            _traced_stage(config, shape, stage, mix, traced_sequences, None if differ else min(layers, number))
            for number in (few, few + 1)
        )

        def extended(first: Held, second: Held) -> Counter[str]:
            less, more = Counter(first.bytes_by_category), Counter(second.bytes_by_category)
            whole = {name: less[name] + (layers - few) * (more[name] - less[name]) for name in {*less, *more}}
            return Counter({name: count * times for name, count in whole.items()})

        return cls(
            forward=extended(shallow.forward, deeper.forward),
            saved=extended(shallow.saved, deeper.saved),
            backward=extended(shallow.backward, deeper.backward),
            passed_on_bytes=times * shallow.passed_on_bytes,
            input_bytes=times * shallow.input_bytes,
        )


@dataclass(frozen=True)
class _Rank:
    """The stages of a rank, how many stages each of them sends to, and the order in which the rank works on them."""

    stages: list[_Stage]
    groups: list[StageGroups]
    neighbours: list[int]
    order: list[tuple[Pass, int]]

    @property
    def total_bytes(self) -> int:
        return max(held.total() for held in self.fullest.values())

    @cached_property
    def fullest(self) -> dict[Moment, Counter[str]]:
        """Peak memory of each kind.

        Torch's interleaved schedule lets go of all that it sent at the end of a step: also of outputs whose backward
        pass is over, and of gradients.
        """
        peaks: dict[Moment, Counter[str]] = {}
        for moment, held in self._moments():
            peaks[moment] = max(peaks.get(moment, Counter()), held, key=Counter.total)
        return peaks

    def _moments(self) -> Iterator[tuple[Moment, Counter[str]]]:
        in_flight = [0] * len(self.stages)  # micro-batches
        late, seen = 0, set[tuple[object, ...]]()
        passes = Counter(self.order)
        done = Counter[tuple[Pass, int]]()
        for direction, number in self.order:
            in_flight[number] -= direction == "backward"  # what this pass works on is in its own moment
            state, groups = self._of_weights(passes, done), self.groups[number]
            if (direction, number, late, *in_flight, *state.values()) not in seen:
                seen.add((direction, number, late, *in_flight, *state.values()))
                fresh = Counter({REDUCED: groups.backward_bytes * (direction == "backward")})
                yield direction, getattr(self.stages[number], direction) + self._others(in_flight, late) + state + fresh
            done[direction, number] += 1
            in_flight[number] += direction == "forward"
            late += self.neighbours[number] * (direction == "backward" and len(self.stages) > 1)
            if direction == "backward" and done[direction, number] == passes[direction, number]:
                state = self._of_weights(passes, done)
                state += Counter({GATHERED: groups.gathered_in_reduction_bytes, WHOLE: groups.whole_gradient_bytes})
                state[SHARDS] -= groups.sharded_bytes
                yield "reduction", self._others(in_flight, late) + state + Counter({REDUCED: groups.reduced_bytes})

    def _others(self, in_flight: Sequence[int], late: int) -> Counter[str]:
        """Other micro-batches, and sent tensors."""
        sent = Counter({"sent": late * self.stages[0].passed_on_bytes})
        return sum((_times(stage.saved, count) for stage, count in zip(self.stages, in_flight, strict=True)), sent)

    def _of_weights(self, passes: Counter[tuple[Pass, int]], done: Counter[tuple[Pass, int]]) -> Counter[str]:
        """Gathered weights and gradients of the stages after these passes. Torch's interleaved schedule gathers all of
        the first three stages that a rank will use, so none of fewer is gathered twice."""
        weights = Counter[str]()
        for number, groups in enumerate(self.groups):
            backward = ("backward", number)
            if done[backward] == passes[backward]:  # type: ignore[index]
                weights[SHARDS] += groups.sharded_bytes
            else:
                weights[GATHERED] += groups.gathered_bytes
                weights[WHOLE] += groups.whole_gradient_bytes * bool(done[backward])  # type: ignore[index]
        return weights


def _times(sizes: Counter[str], count: int) -> Counter[str]:
    return Counter({name: count * size for name, size in sizes.items()})


def parts_of(sizes: Counter[str]) -> list[MemoryPart]:
    return [MemoryPart(name, sizes[category], why) for category, (name, why) in NAMES.items()]


def _traced_stage(
    config: RunConfig, shape: ModelShape, stage: Stage, mix: Mix, rows: int, layers: int | None
) -> StageTrace:
    """Trace a step of a pipeline stage with `layers` layers. None: all layers of the stage."""
    train = config.train
    return _traced(
        config.model.model_dump_json(),
        shape.vocabulary,
        Stage(tuple(stage.layers) if layers is None else range(layers), stage.is_first, stage.is_last),
        rows=(rows, config.data.sequence_length, *mix),
        cached=is_cached(config),
        compute="fp32" if train.precision == "fp32" else "bf16 weights" if train.has_bf16_weights else "bf16 parts",
        recompute=Recompute.of(train),
        tensor_parallel=train.tensor_parallel,
        sequence_parallel=train.sequence_parallel,
    )


@disk_cached
def _traced(
    model: str,
    vocabulary: int,
    stage: Stage,
    *,
    rows: tuple[int, int, int, int],
    cached: bool,
    compute: Compute,
    recompute: Recompute,
    tensor_parallel: int,
    sequence_parallel: bool,
) -> StageTrace:
    """`model` is the model section as JSON; `rows`: number of sequences, and tokens, images, labels of each."""
    from vlmpipe.trainer.config.model import ModelConfig
    from vlmpipe.trainer.tracing.fake_inputs import SequenceShape
    from vlmpipe.trainer.tracing.pipeline_stage import trace_stage

    num_sequences, sequence_length, images, label_tokens = rows
    return trace_stage(
        ModelConfig.model_validate_json(model),
        SequenceShape(num_sequences, sequence_length, num_sequences * images, num_sequences * label_tokens),
        stage,
        vocabulary=vocabulary,
        cached=cached,
        compute=compute,
        recompute=recompute,
        tensor_parallel=tensor_parallel,
        sequence_parallel=sequence_parallel,
    )
