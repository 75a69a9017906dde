"""The sizes of a model that decide its compute and memory. Imports no torch: the planner reads them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, get_args

Part = Literal[
    "tower", "tower_adapters", "projector", "projector_adapters", "embedding", "language_layers", "adapters", "head"
]
PARTS: tuple[Part, ...] = get_args(Part)
ADAPTERS: tuple[Part, ...] = ("tower_adapters", "projector_adapters", "adapters")  # of tower, projector, language model
OF_LANGUAGE_MODEL: tuple[Part, ...] = ("embedding", "language_layers", "head")


@dataclass(frozen=True)
class Stack:
    """A stack of equal transformer layers."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    gated: bool  # the feed-forward part has three matrices (SwiGLU) instead of two
    layer_parameters: int  # of one layer

    @property
    def matrices(self) -> int:
        """Parameters in one layer's matrices: query, key, value, output, and two or three in the feed-forward part."""
        attention = 2 * (self.heads + self.kv_heads) * self.head_dim
        return self.hidden * (attention + (3 if self.gated else 2) * self.intermediate)


@dataclass(frozen=True)
class Windows:
    """Windowed attention of a tower: all layers but `full_layers` attend inside squares of the image."""

    side: int  # in language-model tokens
    full_layers: int


@dataclass(frozen=True)
class TrainedLayers:
    """Trained parameters of each layer of a stack, without adapters."""

    parameters: tuple[int, ...]
    in_matrices: tuple[int, ...]  # those of them in matrices

    @property
    def first(self) -> int | None:
        """The first trained layer."""
        return next((number for number, count in enumerate(self.parameters) if count), None)

    @property
    def has_vectors_first(self) -> bool:
        """Return whether norms or biases of the first trained layer are trained."""
        return self.first is not None and self.parameters[self.first] > self.in_matrices[self.first]


@dataclass(frozen=True)
class TrainableSubset:
    """Trained parameters of a model with name patterns."""

    parameters: dict[Part, int]
    language: TrainedLayers
    tower: TrainedLayers


@dataclass(frozen=True)
class Growth:
    """FLOPs of n tokens or patches: linear * n + quadratic * n**2."""

    linear: float
    quadratic: float = 0.0

    def of(self, count: float) -> float:
        return self.linear * count + self.quadratic * count**2


@dataclass(frozen=True)
class CountedFlops:
    """Forward FLOPs that were counted in a pass, where widths do not tell them. The head's are not in it."""

    tower: Growth  # of the patches of one image; products with the patches themselves included
    projector: Growth  # of the same patches
    language: Growth  # of the tokens of one sample, all layers together


@dataclass(frozen=True)
class LeftOut:
    """Weights of the language model's layers that the default of `model.lora.targets` leaves without adapters."""

    name: str  # within a layer
    reason: str
    parameters: int  # in all layers


@dataclass(frozen=True)
class DeltaRules:
    """Gated delta rules of a language model, and what one keeps for the backward pass, a token and layer."""

    layers: int
    torch_bytes: int  # torch's own code, which plans count
    kernel_bytes: int  # flash-linear-attention


@dataclass(frozen=True)
class ModelShape:
    """A vision-language model: tower, projector, embedding, language layers with adapters, and head."""

    tower: Stack
    tower_tokens: int  # of one image in the tower, with the class token
    image_tokens: int  # of one image in a sequence; the most possible if images differ (see `of_images`)
    feature_width: int  # numbers in one feature token
    patch_pixels: int  # numbers in one patch: channels x side x side
    language: Stack
    vocabulary: int
    tied_head: bool  # the head's matrix is the embedding's
    parameters: dict[Part, int]  # 0 of a tied head
    frozen: frozenset[Part]  # without a trained parameter
    behind_features: int = 0  # tower parameters after the layer whose output is used: never trained
    adapters: dict[str, int] = field(default_factory=dict)  # adapted layer -> adapter parameters in one language layer
    adapter_rank: int = 0
    without_adapters: tuple[LeftOut, ...] = ()
    merge: int = 0  # side of a token in patches, if images differ in tokens (1 where it has none); else 0
    levels: int = 1  # outputs of the tower, each with a merger; all but one are added to a language layer (DeepStack)
    windows: Windows | None = None
    projector_layers: int = 2
    chosen: TrainableSubset | None = None  # None: each part is trained as a whole or not at all
    shards_tower: bool = True  # tensor parallelism splits its layers too
    stored_numbers: int | None = None  # of one image in the feature cache; None: image tokens x feature width
    image_input_bytes: int = 0  # of one image's inputs other than pixels and features, such as a mask of its pixels
    shards_frozen: bool = False  # train.shard_frozen_weights
    quantized: int = 0  # frozen weights of the language layers that rest in 4 bits
    quantized_bytes: int = 0  # that these take, scales and tables included
    counted: CountedFlops | None = None  # None: FLOPs follow from the widths
    selections: int = 1  # passes of the language model that a training step makes: those that relevance draws
    in_8_bits: int = 0  # trained parameters whose moments `train.optimizer.name` adamw_8bit stores in 8 bits
    delta_rules: DeltaRules | None = None
    routers: int = 0  # of experts, in all language layers, with a loss in transformers that balances them

    def __hash__(self) -> int:
        """A search asks the same of one model thousands of times, and caches of functions need a hash."""
        return hash((self.tower, self.language, self.vocabulary, self.frozen, self.image_tokens))

    @property
    def trains_tower(self) -> bool:
        """Return whether the tower or an adapter in it is trained."""
        return bool(self.trained["tower"] or self.parameters["tower_adapters"])

    @property
    def trains_projector(self) -> bool:
        """Return whether the projector or an adapter in it is trained."""
        return bool(self.trained["projector"] or self.parameters["projector_adapters"])

    @property
    def images_differ(self) -> bool:
        """Return whether images differ in tokens."""
        return self.merge > 0

    @property
    def image_layers(self) -> int:
        """Number of first language layers to which a level of the tower is added."""
        return self.levels - 1

    def of_images(self, tokens: int) -> ModelShape:
        """Return the shape with images of `tokens` tokens, if images differ."""
        if not self.images_differ:
            return self
        share = tokens / self.image_tokens
        return replace(
            self,
            image_tokens=tokens,
            tower_tokens=round(share * self.tower_tokens),
            stored_numbers=None if self.stored_numbers is None else round(share * self.stored_numbers),
            image_input_bytes=round(share * self.image_input_bytes),
        )

    @property
    def total_parameters(self) -> int:
        return sum(self.parameters.values())

    @property
    def trainable_parameters(self) -> int:
        return sum(self.trained.values())

    @cached_property
    def trained(self) -> dict[Part, int]:
        if self.chosen:
            return dict(self.chosen.parameters)
        trained = {part: 0 if part in self.frozen else count for part, count in self.parameters.items()}
        if trained["tower"]:
            trained["tower"] -= self.behind_features
        return trained

    @cached_property
    def sliced(self) -> dict[Part, int]:
        """Parameters that FSDP shards: all of the tower, projector or language model if any of it is trained, adapters
        aside (trainer/strategies/fsdp.py), or all there are (train.shard_frozen_weights). Never quantized ones."""
        parameters = self.parameters | {"language_layers": self.parameters["language_layers"] - self.quantized}
        if self.shards_frozen:
            return parameters
        trained = self.trained
        language = any(trained[part] for part in OF_LANGUAGE_MODEL)
        return {
            part: count if part in ADAPTERS or (language if part in OF_LANGUAGE_MODEL else trained[part]) else 0
            for part, count in parameters.items()
        }

    @cached_property
    def left_whole(self) -> frozenset[Part]:
        """Parts that FSDP neither shards nor casts."""
        sliced = self.sliced
        return frozenset(part for part, count in self.parameters.items() if count and not sliced[part])

    def trained_per_layer(self, ranks: int = 1) -> int:
        """Trained parameters of the language layer with most of them, on each of `ranks` tensor-parallel ranks."""
        adapters = self.of_tensor_rank("adapters", sum(self.adapters.values()), ranks)
        return adapters + max(self.trained_in_layer(number, ranks) for number in range(self.language.layers))

    def trained_in_layer(self, number: int, ranks: int = 1) -> int:
        """Trained parameters of one language layer, without adapters."""
        if self.chosen is None:
            parameters = 0 if "language_layers" in self.frozen else self.language.layer_parameters
            return self.of_tensor_rank("language_layers", parameters, ranks)
        layers = self.chosen.language
        return _on_rank(layers.parameters[number], layers.in_matrices[number], ranks)

    def trained_on_rank(self, part: Part, ranks: int) -> int:
        """Trained parameters of a part on each of `ranks` tensor-parallel ranks."""
        count = self.trained[part]
        if self.chosen is None or part in ADAPTERS:
            return self.of_tensor_rank(part, count, ranks)
        divided = {
            "tower": sum(self.chosen.tower.in_matrices),
            "language_layers": sum(self.chosen.language.in_matrices),
            "embedding": count,
            "head": count,
        }
        return _on_rank(count, divided.get(part, 0), ranks)

    def reaches_layers(self, *, cached: bool) -> bool:
        """Return whether something before the language layers is trained, so that the backward pass reaches them
        all.
        """
        return bool(self.trains_projector or self.trained["embedding"] or (self.trains_tower and not cached))

    def first_reached_layer(self, *, cached: bool) -> int:
        """The language layer at which the backward pass ends; the number of layers if it reaches none."""
        if self.reaches_layers(cached=cached) or self.trained["adapters"]:
            return 0
        if self.chosen is None:
            return self.language.layers if "language_layers" in self.frozen else 0
        first = self.chosen.language.first
        return self.language.layers if first is None else first

    @property
    def unsharded_adapters(self) -> int:
        """Adapter parameters of one language layer that tensor parallelism does not shard: of each adapter the matrix
        next to the hidden states."""
        return len(self.adapters) * self.adapter_rank * self.language.hidden

    def of_tensor_rank(self, part: Part, count: float, ranks: int) -> int:
        """How many of `count` parameters of a part are on each of `ranks` tensor-parallel ranks.

        Embedding, head, matrices of layers and one matrix of each adapter are sharded. Everything else counts as whole,
        biases too.
        """
        divided = {
            "tower": self.tower.layers * self.tower.matrices if self.shards_tower else 0,
            "language_layers": self.language.layers * self.language.matrices,
            "adapters": self.parameters["adapters"] - self.language.layers * self.unsharded_adapters,
            "embedding": self.parameters["embedding"],
            "head": self.parameters["head"],
        }
        share = divided[part] / self.parameters[part] if self.parameters[part] and part in divided else 0.0
        return round(count * (1 - share + share / ranks))


def _on_rank(count: int, divided: int, ranks: int) -> int:
    """Parameters on each of `ranks` ranks that share `divided` of `count` parameters."""
    return count - divided + round(divided / ranks)
