"""FLOPs of one packed sequence, from the model's sizes. A multiply-add counts as two.

Counts what the training modules compute, like torch's own counter: matrix products, convolutions and attention, but no
norms, activations or lookups. The tower runs all its layers even when an earlier one feeds the projector. Samples
attend to themselves only, and padding costs almost nothing (models that need a mask compute more: see
`vlmpipe.trainer.models.attention.varlen`). Only label positions go through the head. Products per layer:
Kaplan et al. 2020 (arXiv 2001.08361), section 2.1. A backward pass takes one product for a weight's gradient and one
for its input's.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass

from vlmpipe.trainer.config.train_options import Checkpointing
from vlmpipe.trainer.sizing.image_grids import near_square
from vlmpipe.trainer.sizing.model_shape import ModelShape, Part, Stack

BEFORE_HEAD: tuple[Part, ...] = ("embedding", "language_layers", "adapters")


@dataclass(frozen=True)
class PartFlops:
    forward: float = 0
    backward: float = 0
    recompute: float = 0  # forward work repeated in the backward pass

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.recompute

    def times(self, count: float) -> PartFlops:
        return PartFlops(self.forward * count, self.backward * count, self.recompute * count)

    def __add__(self, other: PartFlops) -> PartFlops:
        return PartFlops(self.forward + other.forward, self.backward + other.backward, self.recompute + other.recompute)


@dataclass(frozen=True)
class SequenceFlops:
    """By part of the model. Integers for integer numbers of tokens and images."""

    tower: PartFlops
    projector: PartFlops
    language_layers: PartFlops  # matrix products with weights
    adapters: PartFlops
    attention: PartFlops  # scores and weighted sums in the language layers
    head: PartFlops

    def parts(self) -> Iterator[tuple[str, PartFlops]]:
        for field in dataclasses.fields(self):
            yield field.name, getattr(self, field.name)

    @property
    def forward(self) -> float:
        return self._summed.forward

    @property
    def total(self) -> float:
        return self._summed.total

    @functools.cached_property
    def _summed(self) -> PartFlops:
        return sum((part for _, part in self.parts()), PartFlops())

    def times(self, count: float) -> SequenceFlops:
        return SequenceFlops(**{name: part.times(count) for name, part in self.parts()})


@functools.lru_cache
def flops_per_sequence(
    shape: ModelShape,
    *,
    sequence_length: float,
    images: float,
    label_tokens: float,
    cached: bool,
    activation_checkpointing: Checkpointing,
    loss_chunks: int = 1,
    feature_layer: int = -1,
    sample_pairs: float | None = None,
    recomputes_tower: bool = False,
) -> SequenceFlops:
    """FLOPs that the hardware computes for one sequence of `sequence_length` tokens, padding included.

    cached: leaves out the tower.
    activation_checkpointing: `full` repeats the language layers, except the last product of each, which no gradient
        needs; `selective` repeats no product.
    loss_chunks: equal chunks of labels; all but one go through the head twice.
    feature_layer: of the run file; layers of a tower after it do not run.
    sample_pairs: sum of the squares of the samples' lengths; None for a single sample.
    recomputes_tower: of a trained tower, the layers that run and get gradients are computed once more.

    The backward pass ends at the first trained layer. If patterns choose some of its weights, all its products count,
    except those for the gradient of its input if only matrices are trained. The same holds for the projector.
    """
    reaches_projector = shape.trains_projector or (not cached and shape.trains_tower)
    # Without adapted layers, what counts as adapters is a relevance module, which gets no gradient through the layers.
    before_head = [part for part in BEFORE_HEAD if part != "adapters" or shape.adapters]
    reaches_language = reaches_projector or any(shape.trained[part] for part in before_head)
    reaches_layers = reaches_projector or bool(shape.trained["embedding"])
    head_products = int(reaches_language) + int("head" not in shape.frozen)

    language = shape.language
    pairs = sequence_length**2 if sample_pairs is None else sample_pairs
    if shape.counted:
        layers, attention = shape.counted.language.linear * sequence_length, shape.counted.language.quadratic * pairs
    else:
        layers = language.layers * sequence_length * 2 * language.matrices
        attention = language.layers * _attention_flops(language, pairs)
    adapters = language.layers * sequence_length * 2 * sum(shape.adapters.values())
    reached = 1 - shape.first_reached_layer(cached=cached) / language.layers if reaches_language else 0
    again = reached if activation_checkpointing == "full" else 0
    last_products, last_of_adapters = (
        language.layers * sequence_length * last_product for last_product in _last_products(shape)
    )
    # If nothing is trained before the first layer, its query, key and value need no gradient of their input, unless a
    # vector of that layer is trained: it may be the norm before them.
    only_matrices = shape.chosen is None or not shape.chosen.language.has_vectors_first
    unreached = (
        sequence_length * _input_flops_per_token(language) if reached and not reaches_layers and only_matrices else 0
    )
    own_products = _trained_share(shape) * layers  # for the gradients of weights
    head = 2 * label_tokens * language.hidden * shape.vocabulary
    again_in_head = head * (loss_chunks - 1) / loss_chunks if head_products and loss_chunks > 1 else 0
    passes = shape.selections
    return SequenceFlops(
        tower=PartFlops() if cached else _tower(shape, feature_layer, recomputes=recomputes_tower).times(images),
        projector=_projector(shape, reaches_inputs=not cached and shape.trains_tower).times(images),
        language_layers=PartFlops(
            layers, _rounded(reached * layers + own_products) - unreached, _rounded(again * (layers - last_products))
        ).times(passes),
        adapters=PartFlops(adapters, 2 * adapters, adapters - last_of_adapters if again else 0).times(passes),
        # Two products forward; four backward, even with frozen weights.
        attention=PartFlops(attention, _rounded(2 * attention * reached), _rounded(attention * again)).times(passes),
        head=PartFlops(head, head_products * head, again_in_head).times(passes),
    )


def model_flops_per_sequence(
    shape: ModelShape, *, useful_tokens: float, samples: float, images: float, label_tokens: float, cached: bool
) -> float:
    """The numerator of model FLOPs utilisation (MFU): what the model needs for one sequence, however it is computed.

    Without padding and recomputation. Samples are taken as equally long, which undercounts attention a little. MFU:
    Chowdhery et al. 2022 (arXiv 2204.02311), appendix B.
    """
    sample = flops_per_sequence(
        shape,
        sequence_length=useful_tokens / samples,
        images=images / samples,
        label_tokens=label_tokens / samples,
        cached=cached,
        activation_checkpointing="none",
    )
    return sample.times(samples).total


def tower_flops_per_image(shape: ModelShape, feature_layer: int = -1) -> float:
    """Forward FLOPs of the tower for one image."""
    return _tower(shape, feature_layer).forward


def tower_attention_share(shape: ModelShape, feature_layer: int = -1) -> float:
    """Share of the tower's forward FLOPs that is attention between patches, which no weight takes part in."""
    forward = tower_flops_per_image(shape, feature_layer)
    attention = _counted_in_tower(shape, 0.0)[1] if shape.counted else _tower_attention(shape)
    used_layers = feature_layer if feature_layer >= 0 else shape.tower.layers + 1 + feature_layer
    return attention * used_layers / shape.tower.layers / forward if forward else 0.0


def _trained_share(shape: ModelShape) -> float:
    """Trained share of the parameters in matrices of language layers."""
    if shape.chosen:
        return sum(shape.chosen.language.in_matrices) / (shape.language.layers * shape.language.matrices)
    return float("language_layers" not in shape.frozen)


def _rounded(count: float) -> float:
    """Remove the rounding error of a share of layers."""
    return round(count) if abs(count - round(count)) < 1e-6 * abs(count) else count


def _input_flops_per_token(stack: Stack) -> int:
    """Forward, one layer: query, key and value."""
    return 2 * stack.hidden * (stack.heads + 2 * stack.kv_heads) * stack.head_dim


def _last_products(shape: ModelShape) -> tuple[int, int]:
    """Forward, one layer and token: the last product of the layer, or of the adapter on it; the other is 0.

    An adapter's last product is B's: from the rank to the hidden size.
    """
    stack = shape.language
    in_last = next((count for name, count in shape.adapters.items() if name.endswith("down_proj")), 0)
    if in_last:
        return 0, 2 * in_last * stack.hidden // (stack.hidden + stack.intermediate)
    return 2 * stack.hidden * stack.intermediate, 0


def _attention_flops(stack: Stack, pairs: float) -> float:
    """Forward, one layer: scores and weighted sums of values, for `pairs` pairs of tokens."""
    return 4 * pairs * stack.heads * stack.head_dim


def _tower(shape: ModelShape, feature_layer: int, *, recomputes: bool = False) -> PartFlops:
    stack, tokens = shape.tower, shape.tower_tokens
    patches = 2 * tokens * shape.patch_pixels * stack.hidden  # one too many with a class token: below 0.1 %
    if shape.counted:
        in_weights, attention = _counted_in_tower(shape, patches)
    else:
        in_weights, attention = stack.layers * tokens * 2 * stack.matrices, _tower_attention(shape)
    used_layers = feature_layer if feature_layer >= 0 else stack.layers + 1 + feature_layer
    in_used_layers = (in_weights + attention) * used_layers / stack.layers
    forward = patches + in_used_layers
    if in_adapters := 2 * tokens * shape.parameters["tower_adapters"]:
        # Query, key and value of the first layer need no gradient of their input.
        backward = (in_weights + 2 * attention) * used_layers / stack.layers - tokens * _input_flops_per_token(stack)
        again = (in_used_layers + in_adapters) * recomputes
        return PartFlops(int(forward + in_adapters), int(backward + 2 * in_adapters), int(again))
    if "tower" in shape.frozen:
        return PartFlops(int(forward))
    backward = patches + 2 * in_used_layers  # pixels need no gradient
    again = in_used_layers * recomputes
    if shape.chosen:
        chosen, per_parameter = shape.chosen.tower, 2 * tokens
        outside = shape.chosen.parameters["tower"] - sum(chosen.parameters)  # assumed before the layers
        first = 0 if outside or chosen.first is None else chosen.first
        reached = (used_layers - first) / stack.layers
        backward = reached * (in_weights + 2 * attention) + per_parameter * sum(chosen.in_matrices)
        backward += patches if outside else 0
        if not outside and not chosen.has_vectors_first:
            backward -= tokens * _input_flops_per_token(stack)
        again *= reached * stack.layers / used_layers if used_layers else 0
    return PartFlops(int(forward), int(backward), int(again))


def _counted_in_tower(shape: ModelShape, patches: float) -> tuple[float, float]:
    """Forward, all layers that run: products with weights, and attention between all patches of an image."""
    assert shape.counted
    counted, tokens = shape.counted.tower, shape.tower_tokens
    return max(0.0, counted.linear * tokens - patches), counted.quadratic * tokens**2


def _tower_attention(shape: ModelShape) -> float:
    """Forward, all layers. With windows, images are taken as nearly square."""
    stack, tokens, windows = shape.tower, shape.tower_tokens, shape.windows
    if windows is None:
        return stack.layers * _attention_flops(stack, tokens**2)
    seen = float(shape.merge**2)  # mean number of patches that a patch attends to in its window
    for side in near_square(shape.image_tokens):
        pieces = [windows.side] * (side // windows.side) + [side % windows.side]
        seen *= sum(piece**2 for piece in pieces) / side
    in_windows = (stack.layers - windows.full_layers) * _attention_flops(stack, tokens * seen)
    return windows.full_layers * _attention_flops(stack, tokens**2) + in_windows


def _projector(shape: ModelShape, *, reaches_inputs: bool) -> PartFlops:
    """One or two layers on each token of each level. reaches_inputs: a trained tower needs gradients through it."""
    in_adapters = 2 * shape.image_tokens * shape.parameters["projector_adapters"]  # those of a level run on its tokens
    adapters = PartFlops(in_adapters, 2 * in_adapters)
    if shape.projector_layers == 1:
        only = 2 * shape.image_tokens * shape.feature_width * shape.language.hidden
        if shape.counted:
            only = int(shape.counted.projector.of(shape.tower_tokens))
        return adapters + PartFlops(only, only * (int("projector" not in shape.frozen) + int(reaches_inputs)))
    width = shape.feature_width // shape.levels
    inner = width if shape.images_differ else shape.language.hidden
    first = 2 * shape.image_tokens * shape.levels * width * inner
    second = 2 * shape.image_tokens * shape.levels * inner * shape.language.hidden
    trained = "projector" not in shape.frozen
    through = reaches_inputs or bool(in_adapters)
    # In native models the projector begins with a trained norm.
    backward = first * (int(trained) + int(reaches_inputs or (trained and shape.images_differ)))
    backward += second * (int(trained) + int(trained or through))
    return adapters + PartFlops(first + second, backward)
