"""What one micro-batch holds beside weights and gradients, from traces of the real training module.

Layers are equal, so two traces with one and two language layers give any number of them.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pipelines.config import RunConfig
from trainer.models.shape import ModelShape

if TYPE_CHECKING:
    from trainer.tracing import Held

WEIGHT_COPIES = "weight copies"
Bytes = Mapping[str, int]  # by category, see trainer.tracing.Category


@dataclass(frozen=True)
class Activations:
    """Bytes by category at the fullest moment of the forward pass, at that of the backward pass, and where the backward
    pass has reached the first layer again."""

    forward: Bytes
    backward: Bytes
    backward_end: Bytes
    input_bytes: int


@dataclass(frozen=True)
class ModelKey:
    """A model section that can be a key: configurations of parts are dictionaries."""

    json: str
    shape: ModelShape = field(compare=False)


def worst_rows(config: RunConfig, shape: ModelShape) -> list[tuple[int, int]]:
    """(images, label tokens) of the rows that can be fullest: text that is all labels, and as many images as fit."""
    data = config.data
    most_images = min(data.row_images, data.row_tokens // shape.image_tokens)
    return [(0, data.row_tokens), (most_images, data.row_tokens - most_images * shape.image_tokens)]


def activations(config: RunConfig, shape: ModelShape, mixes: Sequence[tuple[int, int]] = ()) -> Activations:
    """Of the fullest of `mixes`, (images, label tokens) of one row; by default `worst_rows`.

    Imports torch and transformers, which takes seconds.
    """
    train, data = config.train, config.data
    found = [
        _of_mix(
            ModelKey(config.model.model_dump_json(), shape),
            rows=train.micro_batch_rows,
            row_tokens=data.row_tokens,
            images=images,
            label_tokens=labels,
            cached=is_cached(config),
            compute=compute_of(config),
            checkpointing=train.activation_checkpointing == "full",
        )
        for images, labels in mixes or worst_rows(config, shape)
    ]
    return max(found, key=lambda one: max(sum(one.forward.values()), sum(one.backward.values())))


def is_cached(config: RunConfig) -> bool:
    """Whether training reads the tower's output instead of running it."""
    return config.features.cache == "on" or (config.features.cache == "auto" and "tower" in config.model.freeze)


def compute_of(config: RunConfig) -> str:
    """How the strategy computes; see `trainer.tracing.Compute`."""
    if config.train.precision == "fp32":
        return "fp32"
    return "bf16 weights" if config.train.strategy.startswith("fsdp") else "autocast"


@functools.cache
def _of_mix(
    key: ModelKey,
    *,
    rows: int,
    row_tokens: int,
    images: int,
    label_tokens: int,
    cached: bool,
    compute: str,
    checkpointing: bool,
) -> Activations:
    from trainer.config import ModelConfig
    from trainer.tracing import RowShape, trace_step

    one, two = (
        trace_step(
            ModelConfig.model_validate_json(key.json),
            RowShape(rows, row_tokens, rows * images, rows * label_tokens),
            vocabulary=key.shape.vocabulary,
            cached=cached,
            compute=compute,  # type: ignore[arg-type]
            activation_checkpointing=checkpointing,
            language_layers=layers,
        )
        for layers in (1, 2)
    )
    layers = key.shape.language.layers
    return Activations(
        forward=_extended(one.forward, two.forward, layers),
        backward=_extended(one.backward, two.backward, layers),
        backward_end={str(name): count for name, count in one.backward.bytes_by_category.items()},
        input_bytes=one.input_bytes,
    )


def _extended(one: Held, two: Held, layers: int) -> dict[str, int]:
    first, second = Counter(one.bytes_by_category), Counter(two.bytes_by_category)
    return {name: first[name] + (layers - 1) * (second[name] - first[name]) for name in sorted({*first, *second})}
