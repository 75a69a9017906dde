"""Memory of a pipeline's stages, by part, at the fullest moments of a training step.

In a 1F1B schedule stage s of S (from 0) holds min(S - s, micro-batches) micro-batches at a time, so the first one holds
most of them. Which stage is the fullest depends on what else lies in each.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipelines.config import RunConfig
from pipelines.planner.activations import WEIGHT_COPIES, is_cached, require_degree, worst_rows
from pipelines.planner.memory_parts import FP32_BYTES, MemoryPart
from pipelines.planner.stages import StageWeights
from trainer.models.family import Stage
from trainer.models.recompute import Recompute
from trainer.models.shape import ModelShape

if TYPE_CHECKING:
    from trainer.stage_tracing import StageTrace
    from trainer.tracing import Held

ADAM_MOMENTS = 2  # fp32 each
Mix = tuple[int, int]  # images and label tokens of one row
NAMES = {
    WEIGHT_COPIES: ("bf16 copies of weights", "made by autocast, for each micro-batch that is held"),
    "vision": ("vision tokens", "projected features, and the tower where it runs"),
    "language": ("activations", "held for the backward pass"),
    "head": ("logits", "of label tokens only, a chunk at a time"),
    "backward": ("backward's temporaries", ""),
}


def stage_moments(
    config: RunConfig,
    shape: ModelShape,
    stages: Sequence[Stage],
    number: int,
    *,
    passes: int,
    mixes: Sequence[Mix] = (),
    from_one_row: bool = False,
) -> dict[str, list[MemoryPart]]:
    """All that torch allocates in one stage, on each of its ranks: in the forward pass, in the backward pass and in the
    update. Raises ConfigError for a model that train.tensor_parallel ranks cannot split.

    Args:
        passes: micro-batches of a step.
        mixes: what rows may hold; the fullest counts. By default `worst_rows`.
        from_one_row: trace a micro-batch of one row and take the others as its multiples, for a search.
    """
    require_degree(config)
    stage = stages[number]
    weights = StageWeights.of(shape, stage, cached=is_cached(config), tensor_parallel=config.train.tensor_parallel)
    held = min(len(stages) - number, passes)
    found = [_Stage.traced(config, shape, stage, mix, from_one_row) for mix in mixes or worst_rows(config, shape)]
    fullest = max(found, key=lambda one: one.total_bytes(held))
    # What is received has a buffer for each micro-batch: hidden states from before, their gradients from behind.
    in_schedule = max(passes, len(stages))
    buffers = in_schedule * ((not stage.is_first) + (not stage.is_last))
    # What was sent is let go of late: the last gradient, and the output of the last but one forward pass of the start.
    # A micro-batch that the schedule has too many is an output of zeros.
    late = (not stage.is_first and passes > held) + (not stage.is_last and passes >= 2 * held - 1)
    late += min(len(stages) - number, in_schedule) - held
    sent = MemoryPart("sent", late * fullest.passed_on_bytes, "between stages, not yet let go of")
    static = [
        *lasting_parts(weights),
        MemoryPart("inputs", passes * fullest.input_bytes, "tokens, labels and images of a step"),
        MemoryPart("received", buffers * fullest.passed_on_bytes, "between stages, for each micro-batch of a step"),
    ]
    update = MemoryPart("optimizer's temporaries", FP32_BYTES * weights.trainable, "one moment's root")
    moments = {
        "forward": [*fullest.parts(fullest.forward, held), sent],
        "backward": [*fullest.parts(fullest.backward, held), sent],
        "step": [update],
    }
    return {moment: [part for part in [*static, *parts] if part.bytes] for moment, parts in moments.items()}


def lasting_parts(weights: StageWeights) -> list[MemoryPart]:
    """What a stage holds whatever its rows are."""
    return [
        MemoryPart("weights", FP32_BYTES * weights.trainable, "fp32, trained"),
        MemoryPart("frozen weights", FP32_BYTES * weights.frozen, "fp32"),
        MemoryPart("optimizer", ADAM_MOMENTS * FP32_BYTES * weights.trainable, "two moments in fp32"),
        MemoryPart("gradients", FP32_BYTES * weights.trainable, "fp32, in the buckets of all-reduce"),
    ]


@dataclass(frozen=True)
class _Stage:
    """Bytes by category, of one micro-batch of one mix."""

    forward: Counter[str]
    kept: Counter[str]
    backward: Counter[str]
    passed_on_bytes: int
    input_bytes: int

    @classmethod
    def traced(cls, config: RunConfig, shape: ModelShape, stage: Stage, mix: Mix, from_one_row: bool) -> _Stage:
        """Layers are equal, so traces of one and of two of them give any number."""
        layers, rows = len(stage.layers), config.train.micro_batch_rows
        traced_rows = 1 if from_one_row else rows
        times = rows // traced_rows
        one, two = (_traced_stage(config, shape, stage, mix, traced_rows, min(layers, number)) for number in (1, 2))

        def extended(first: Held, second: Held) -> Counter[str]:
            few, more = Counter(first.bytes_by_category), Counter(second.bytes_by_category)
            whole = {name: few[name] + max(0, layers - 1) * (more[name] - few[name]) for name in {*few, *more}}
            return Counter({name: count * (1 if name == WEIGHT_COPIES else times) for name, count in whole.items()})

        return cls(
            forward=extended(one.forward, two.forward),
            kept=extended(one.kept, two.kept),
            backward=extended(one.backward, two.backward),
            passed_on_bytes=times * one.passed_on_bytes,
            input_bytes=times * one.input_bytes,
        )

    def total_bytes(self, held: int) -> int:
        return (held - 1) * self.kept.total() + max(self.forward.total(), self.backward.total())

    def parts(self, moment: Counter[str], held: int) -> list[MemoryPart]:
        return [
            MemoryPart(name, (held - 1) * self.kept[category] + moment[category], why)
            for category, (name, why) in NAMES.items()
        ]


def _traced_stage(config: RunConfig, shape: ModelShape, stage: Stage, mix: Mix, rows: int, layers: int) -> StageTrace:
    train = config.train
    return _traced(
        config.model.model_dump_json(),
        shape.vocabulary,
        Stage(range(layers), stage.is_first, stage.is_last),
        rows=(rows, config.data.row_tokens, *mix),
        cached=is_cached(config),
        in_bf16=train.precision != "fp32",
        recompute=Recompute.of(train),
        tensor_parallel=train.tensor_parallel,
        sequence_parallel=train.sequence_parallel,
    )


@functools.cache
def _traced(
    model: str,
    vocabulary: int,
    stage: Stage,
    *,
    rows: tuple[int, int, int, int],
    cached: bool,
    in_bf16: bool,
    recompute: Recompute,
    tensor_parallel: int,
    sequence_parallel: bool,
) -> StageTrace:
    """`model` is the model section as JSON; `rows` are their number and of one row tokens, images and label tokens."""
    from trainer.model_config import ModelConfig
    from trainer.stage_tracing import trace_stage
    from trainer.trace_rows import RowShape

    num_rows, row_tokens, images, label_tokens = rows
    return trace_stage(
        ModelConfig.model_validate_json(model),
        RowShape(num_rows, row_tokens, num_rows * images, num_rows * label_tokens),
        stage,
        vocabulary=vocabulary,
        cached=cached,
        compute="autocast" if in_bf16 else "fp32",
        recompute=recompute,
        tensor_parallel=tensor_parallel,
        sequence_parallel=sequence_parallel,
    )
