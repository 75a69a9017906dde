"""What one micro-batch holds beside weights and gradients, from traces of the real training module.

Layers are equal, so two traces with one and two language layers give any number of them.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipelines.config import RunConfig
from pipelines.planner.layout import SHARDED_BY_FSDP, layout_of
from trainer.models.recompute import Recompute
from trainer.models.shape import ModelShape

if TYPE_CHECKING:
    from trainer.tracing import Held, StepTrace

WEIGHT_COPIES = "weight copies"
# trainer.tracing.Compute, whether no layer holds on to its weights, and the ranks that split each layer
Computing = tuple[str, bool, int]
Bytes = Mapping[str, int]  # by category, see trainer.tracing.Category


@dataclass(frozen=True)
class Activations:
    """Bytes by category at the fullest moment of the forward pass, at that of the backward pass, and where the backward
    pass has reached the first layer again."""

    forward: Bytes
    backward: Bytes
    backward_end: Bytes
    input_bytes: int

    def of_rows(self, rows: int, two: Activations) -> Activations:
        """The same for `rows` rows at once, when these are of one and those in `two` of two: copies of weights do not
        grow with rows, nor do the logits of a chunk."""

        def extended(one: Bytes, more: Bytes) -> dict[str, int]:
            first, second = Counter(one), Counter(more)
            return {name: first[name] + (rows - 1) * (second[name] - first[name]) for name in sorted({*first, *second})}

        return Activations(
            extended(self.forward, two.forward),
            extended(self.backward, two.backward),
            extended(self.backward_end, two.backward_end),
            self.input_bytes + (rows - 1) * (two.input_bytes - self.input_bytes),
        )


def worst_rows(config: RunConfig, shape: ModelShape) -> list[tuple[int, int]]:
    """(images, label tokens) of the rows that can be fullest: text that is all labels, and as many images as fit."""
    data = config.data
    most_images = min(data.row_images, data.row_tokens // shape.image_tokens)
    return [(0, data.row_tokens), (most_images, data.row_tokens - most_images * shape.image_tokens)]


def activations(config: RunConfig, shape: ModelShape, mixes: Sequence[tuple[int, int]] = ()) -> Activations:
    """Of the fullest of `mixes`, (images, label tokens) of one row; by default `worst_rows`.

    Imports torch and transformers, which takes seconds. Raises ConfigError for a model that train.tensor_parallel ranks
    cannot split.
    """
    train, data = config.train, config.data
    require_degree(config)

    def traced(images: int, labels: int, layers: int) -> StepTrace:
        return _traced(
            config.model.model_dump_json(),
            shape.vocabulary,
            rows=(train.micro_batch_rows, data.row_tokens, images, labels),
            cached=is_cached(config),
            computing=computing_of(config),
            recompute=Recompute.of(train),
            layers=layers,
        )

    def fullest(mix: tuple[int, int]) -> int:
        return max(traced(*mix, 1).forward.total_bytes, traced(*mix, 1).backward.total_bytes)

    mix = max(mixes or worst_rows(config, shape), key=fullest)
    one, two = traced(*mix, 1), traced(*mix, 2)
    layers = shape.language.layers
    return Activations(
        forward=_extended(one.forward, two.forward, layers),
        backward=_extended(one.backward, two.backward, layers),
        backward_end={str(name): count for name, count in one.backward.bytes_by_category.items()},
        input_bytes=one.input_bytes,
    )


def require_degree(config: RunConfig) -> None:
    """Raises ConfigError for a model that train.tensor_parallel ranks cannot split."""
    if config.train.tensor_parallel > 1:
        from trainer.strategies.split import require_splittable

        require_splittable(config.model, config.train.tensor_parallel, cached=is_cached(config))


def is_cached(config: RunConfig) -> bool:
    """Whether training reads the tower's output instead of running it."""
    return config.features.cache == "on" or (config.features.cache == "auto" and "tower" in config.model.freeze)


def computing_of(config: RunConfig) -> Computing:
    """How the strategy computes: two that do it in the same way hold the same activations."""
    strategy = config.train.strategy
    gathered = strategy == "zero3"
    if config.train.precision == "fp32":
        return "fp32", gathered, config.train.tensor_parallel
    in_slices = strategy in SHARDED_BY_FSDP and (strategy != "tp+fsdp" or layout_of(config).weight_shards > 1)
    compute = "bf16 weights" if in_slices else "autocast"
    return compute, gathered, config.train.tensor_parallel


@functools.cache
def _traced(
    model: str,
    vocabulary: int,
    *,
    rows: tuple[int, int, int, int],
    cached: bool,
    computing: Computing,
    recompute: Recompute,
    layers: int,
) -> StepTrace:
    """`model` is the model section as JSON; `rows` are their number and of one row tokens, images and label tokens."""
    from trainer.model_config import ModelConfig
    from trainer.tracing import RowShape, trace_step

    compute, gathered, tensor_parallel = computing
    num_rows, row_tokens, images, label_tokens = rows
    return trace_step(
        ModelConfig.model_validate_json(model),
        RowShape(num_rows, row_tokens, num_rows * images, num_rows * label_tokens),
        vocabulary=vocabulary,
        cached=cached,
        compute=compute,  # type: ignore[arg-type]
        gathered=gathered,
        tensor_parallel=tensor_parallel,
        recompute=recompute,
        language_layers=layers,
    )


def _extended(one: Held, two: Held, layers: int) -> dict[str, int]:
    first, second = Counter(one.bytes_by_category), Counter(two.bytes_by_category)
    return {name: first[name] + (layers - 1) * (second[name] - first[name]) for name in sorted({*first, *second})}
