"""Activation memory of one micro-batch, from traces of the real training module.

Layers are equal, so two traces with one and two language layers (with checkpointing two and three) give any number of
them. Where the tower's levels are added to the first layers (DeepStack), these are traced too. Where patterns choose
what is trained layers differ, and all of them are traced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vlmpipe.config.run_config import RunConfig
from vlmpipe.planner.disk_cache import disk_cached
from vlmpipe.planner.model_architecture import require_context_parallel, require_shardable, require_stages
from vlmpipe.planner.parallel_layout import SHARDED_BY_FSDP
from vlmpipe.planner.workload import is_cached
from vlmpipe.trainer.models.layers.recompute_policy import Recompute
from vlmpipe.trainer.sizing.model_shape import ModelShape
from vlmpipe.trainer.sizing.trace_results import Held, StepTrace

WEIGHT_COPIES = "weight copies"
# trainer.sizing.trace_results.Compute, whether no layer holds on to its weights, whether gradients of what lies outside
# of layers are sliced at the end, the ranks that split each layer, whether they share its tokens, and the ranks that
# share all layers' tokens
Computing = tuple[str, bool, bool, int, bool, int]
Bytes = Mapping[str, int]  # by category, see vlmpipe.trainer.sizing.trace_results.Category


@dataclass(frozen=True)
class Activations:
    """Bytes by category at the fullest moment of the forward pass, at that of the backward pass before the first
    gradient of a weight is there and of what comes after it, and where the backward pass has reached the first layer
    again."""

    forward: Bytes
    turn: Bytes
    backward: Bytes
    backward_end: Bytes
    input_bytes: int

    def of_sequences(self, sequences: int, two: Activations) -> Activations:
        """Return the activations of `sequences` sequences, extrapolated from one sequence (this) and two (`two`).

        Copies of weights do not grow with sequences, nor do the logits of a chunk.
        """

        def extended(smaller: Bytes, more: Bytes) -> dict[str, int]:
            first, second = Counter(smaller), Counter(more)
            return {
                name: first[name] + (sequences - 1) * (second[name] - first[name]) for name in sorted({*first, *second})
            }

        return Activations(
            extended(self.forward, two.forward),
            extended(self.turn, two.turn),
            extended(self.backward, two.backward),
            extended(self.backward_end, two.backward_end),
            self.input_bytes + (sequences - 1) * (two.input_bytes - self.input_bytes),
        )


NO_ACTIVATIONS = Activations({}, {}, {}, {}, 0)


def largest_sequences(config: RunConfig, shape: ModelShape) -> list[tuple[int, int]]:
    """(images, label tokens) of the fullest sequences: text that is all labels, as many images as fit, and where
    ranks share sequences, images that leave all tokens of one rank to labels."""
    sequence_length, max_images = config.data.sequence_length, config.data.max_images_per_sequence

    def with_images(tokens: int) -> tuple[int, int]:
        """Return (images, label tokens) of a sequence with as many images as fit into `tokens`."""
        if shape.images_differ:  # the last image may be smaller, so images can fill them
            in_images = min(tokens, max_images * shape.image_tokens)
            return -(-in_images // shape.image_tokens), sequence_length - in_images
        images = min(max_images, tokens // shape.image_tokens)
        return images, sequence_length - images * shape.image_tokens

    others = sequence_length - sequence_length // config.train.context_parallel
    return list(dict.fromkeys(with_images(tokens) for tokens in (0, others, sequence_length)))


def activations(config: RunConfig, shape: ModelShape, mixes: Sequence[tuple[int, int]] = ()) -> Activations:
    """Return the peak activations over `mixes`, (images, label tokens) of one sequence; default: `largest_sequences`.

    Imports torch and transformers, which takes seconds. Raises ConfigError for a model that train.tensor_parallel or
    train.context_parallel ranks cannot split.
    """
    train, data = config.train, config.data
    require_degree(config)

    def traced(images: int, labels: int, layers: int) -> StepTrace:
        return _traced(
            config.model.model_dump_json(),
            shape.vocabulary,
            rows=(train.micro_batch_size, data.sequence_length, images, labels),
            cached=is_cached(config),
            computing=computing_of(config),
            recompute=Recompute.of(train),
            layers=layers,
        )

    layers = shape.language.layers
    few = shape.levels  # one is added to each layer but the last
    if train.activation_checkpointing == "full":
        few = max(few, 2)  # one alone may be fullest at another place; its input, offloaded, has none before it
    # A recomputed tower may be fullest where few language layers lie after it, and not where all do.
    is_exact = config.model.has_patterns or (train.tower_activation_checkpointing and shape.trains_tower)
    few = layers if is_exact else min(few, layers)
    # Where the backward pass ends: what is held then does not depend on the layers after it.
    at_end = min(shape.first_reached_layer(cached=is_cached(config)), layers - 1) + 1 if shape.chosen else 1

    def fullest(mix: tuple[int, int]) -> int:
        trace = traced(*mix, few)
        return max(phase.total_bytes for phase in (trace.forward, trace.turn, trace.backward))

    mix = max(mixes or largest_sequences(config, shape), key=fullest)
    fewer, more = traced(*mix, few), traced(*mix, min(few + 1, layers))
    return Activations(
        forward=_extended(fewer.forward, more.forward, layers - few),
        turn=_extended(fewer.turn, more.turn, layers - few),
        backward=_extended(fewer.backward, more.backward, layers - few),
        backward_end={str(name): count for name, count in traced(*mix, at_end).backward.bytes_by_category.items()},
        input_bytes=fewer.input_bytes,
    )


def can_recompute_tower(config: RunConfig, shape: ModelShape) -> bool:
    """Return whether train.tower_activation_checkpointing would take less memory."""
    return shape.trains_tower and not is_cached(config) and not config.train.tower_activation_checkpointing


def require_degree(config: RunConfig) -> None:
    """Raises ConfigError for a model that ranks cannot split as the run file says."""
    if config.train.tensor_parallel > 1:
        ranks, sequence = config.train.tensor_parallel, config.train.sequence_parallel
        require_shardable(config.model, ranks, cached=is_cached(config), sequence=sequence)
    if config.train.context_parallel > 1:
        require_context_parallel(config.model, config.train.context_parallel)
    if config.train.pipeline_parallel > 1:
        require_stages(config.model)


def computing_of(config: RunConfig) -> Computing:
    """How the strategy computes: two that do it in the same way hold the same activations."""
    strategy = config.train.strategy
    in_slices = strategy in SHARDED_BY_FSDP or (strategy == "ddp" and config.train.has_bf16_weights)
    compute = "bf16 parts" if in_slices else "autocast"
    if config.train.has_bf16_weights:
        compute = "bf16 weights"
    if config.train.precision == "fp32":
        compute = "fp32"
    degrees = (config.train.tensor_parallel, config.train.sequence_parallel, config.train.context_parallel)
    return compute, strategy == "zero3", in_slices, *degrees


@disk_cached
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
    """`model` is the model section as JSON; `rows`: number of sequences, and tokens, images, labels of each."""
    from vlmpipe.trainer.config.model import ModelConfig
    from vlmpipe.trainer.tracing.fake_inputs import SequenceShape
    from vlmpipe.trainer.tracing.step import trace_step

    compute, gathered, sliced, tensor_parallel, sequence_parallel, context_parallel = computing
    num_sequences, sequence_length, images, label_tokens = rows
    return trace_step(
        ModelConfig.model_validate_json(model),
        SequenceShape(num_sequences, sequence_length, num_sequences * images, num_sequences * label_tokens),
        vocabulary=vocabulary,
        cached=cached,
        compute=compute,  # type: ignore[arg-type]
        gathered=gathered,
        sliced=sliced,
        tensor_parallel=tensor_parallel,
        sequence_parallel=sequence_parallel,
        context_parallel=context_parallel,
        recompute=recompute,
        language_layers=layers,
    )


def _extended(held: Held, of_one_more: Held, more_layers: int) -> dict[str, int]:
    first, second = Counter(held.bytes_by_category), Counter(of_one_more.bytes_by_category)
    return {name: first[name] + more_layers * (second[name] - first[name]) for name in sorted({*first, *second})}
