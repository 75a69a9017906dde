"""The sizes of a model that decide its compute and memory. No torch here: the planner reads them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

Part = Literal["tower", "projector", "embedding", "language_layers", "adapters", "head"]
PARTS: tuple[Part, ...] = ("tower", "projector", "embedding", "language_layers", "adapters", "head")
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
        """Parameters in one layer's matrices: query, key, value, output, and two or three of the feed-forward part."""
        attention = 2 * (self.heads + self.kv_heads) * self.head_dim
        return self.hidden * (attention + (3 if self.gated else 2) * self.intermediate)


@dataclass(frozen=True)
class Windows:
    """Squares of an image inside which the layers of a tower attend, but for some that see the whole image."""

    side: int  # in tokens of the language model
    full_layers: int


@dataclass(frozen=True)
class Matrices:
    """Parameters of one shape. Of one with more axes than two, the first axis and all others together."""

    rows: int
    columns: int
    count: int


@dataclass(frozen=True)
class TrainedLayers:
    """What is trained of each layer of a stack, without adapters."""

    parameters: tuple[int, ...]
    in_matrices: tuple[int, ...]  # of these

    @property
    def first(self) -> int | None:
        """The first layer in which something is trained."""
        return next((number for number, count in enumerate(self.parameters) if count), None)

    @property
    def has_vectors_first(self) -> bool:
        """Whether norms or biases are trained in that layer."""
        return self.first is not None and self.parameters[self.first] > self.in_matrices[self.first]


@dataclass(frozen=True)
class TrainableSubset:
    """What is trained where patterns choose parameters."""

    parameters: dict[Part, int]
    language: TrainedLayers
    tower: TrainedLayers


@dataclass(frozen=True)
class ModelShape:
    """A vision-language model: tower, projector, embedding, language layers with their adapters, and head."""

    tower: Stack
    tower_tokens: int  # what the tower runs on for one image, class token included
    image_tokens: int  # what one image takes in a row; where images differ the most, until `of_images` says otherwise
    feature_width: int  # numbers of one feature token
    patch_pixels: int  # numbers of one patch: channels x side x side
    language: Stack
    vocabulary: int
    tied_head: bool  # the head's matrix is the embedding's
    parameters: dict[Part, int]  # a tied head has 0 of its own
    frozen: frozenset[Part]  # in which nothing is trained
    behind_features: int = 0  # parameters of the tower behind the layer whose output is used: never trained
    adapters: dict[str, int] = field(default_factory=dict)  # adapted layer -> adapter parameters in one language layer
    adapter_rank: int = 0
    merge: int = 0  # of a native model, the side in patches of a token's square; images then differ in tokens
    levels: int = 1  # outputs of the tower, each with a merger; all but one reach a language layer each (DeepStack)
    windows: Windows | None = None
    projector_layers: int = 2
    trained_matrices: tuple[Matrices, ...] = ()  # what else is trained is vectors
    chosen: TrainableSubset | None = None  # None: of each part all is trained, or nothing
    most_tiles: int = 1  # that one image is cut into; to all that computes a tile is an image, and all here is of tiles

    @property
    def images_differ(self) -> bool:
        """Whether images keep their shape, and so differ in tokens."""
        return self.merge > 0

    @property
    def image_layers(self) -> int:
        """Language layers behind which a level of the tower is added: the first ones."""
        return self.levels - 1

    def of_images(self, tokens: int) -> ModelShape:
        """The same with images of `tokens` tokens each, where they differ."""
        if not self.images_differ:
            return self
        return replace(self, image_tokens=tokens, tower_tokens=tokens * self.merge**2)

    @property
    def total_parameters(self) -> int:
        return sum(self.parameters.values())

    @property
    def trainable_parameters(self) -> int:
        return sum(self.trained.values())

    @property
    def trained(self) -> dict[Part, int]:
        """Parameters that training changes."""
        if self.chosen:
            return dict(self.chosen.parameters)
        trained = {part: 0 if part in self.frozen else count for part, count in self.parameters.items()}
        if trained["tower"]:
            trained["tower"] -= self.behind_features
        return trained

    @property
    def sliced(self) -> dict[Part, int]:
        """Parameters that FSDP slices: of the tower, the projector and the language model all, or none where nothing of
        them is trained (trainer/strategies/fsdp.py). Adapters do not make a language model trained."""
        trained = self.trained
        language = any(trained[part] for part in OF_LANGUAGE_MODEL)
        return {
            part: count if part == "adapters" or (language if part in OF_LANGUAGE_MODEL else trained[part]) else 0
            for part, count in self.parameters.items()
        }

    @property
    def left_whole(self) -> frozenset[Part]:
        """Parts that FSDP neither slices nor casts."""
        sliced = self.sliced
        return frozenset(part for part, count in self.parameters.items() if count and not sliced[part])

    def trained_per_layer(self, ranks: int = 1) -> int:
        """Parameters that training changes in one language layer, on each of `ranks` ranks that split it: in that with
        most of them."""
        adapters = self.of_tensor_rank("adapters", sum(self.adapters.values()), ranks)
        return adapters + max(self.trained_in_layer(number, ranks) for number in range(self.language.layers))

    def trained_in_layer(self, number: int, ranks: int = 1) -> int:
        """The same of one of them, without adapters."""
        if self.chosen is None:
            own = 0 if "language_layers" in self.frozen else self.language.layer_parameters
            return self.of_tensor_rank("language_layers", own, ranks)
        of_layers = self.chosen.language
        return _on_rank(of_layers.parameters[number], of_layers.in_matrices[number], ranks)

    def trained_on_rank(self, part: Part, ranks: int) -> int:
        """Parameters of a part that training changes, on each of `ranks` ranks that split the layers between them."""
        count = self.trained[part]
        if self.chosen is None or part == "adapters":
            return self.of_tensor_rank(part, count, ranks)
        divided = {
            "tower": sum(self.chosen.tower.in_matrices),
            "language_layers": sum(self.chosen.language.in_matrices),
            "embedding": count,
            "head": count,
        }
        return _on_rank(count, divided.get(part, 0), ranks)

    def reaches_layers(self, *, cached: bool) -> bool:
        """Whether something is trained before the first language layer, so that the backward pass goes through all."""
        trained = self.trained
        return bool(trained["projector"] or trained["embedding"] or (trained["tower"] and not cached))

    def first_reached_layer(self, *, cached: bool) -> int:
        """The language layer at which the backward pass ends; the number of layers where it ends before the last."""
        if self.reaches_layers(cached=cached) or self.trained["adapters"]:
            return 0
        if self.chosen is None:
            return self.language.layers if "language_layers" in self.frozen else 0
        first = self.chosen.language.first
        return self.language.layers if first is None else first

    @property
    def unsharded_adapters(self) -> int:
        """Adapter parameters of one language layer that are whole on ranks which split it: of each adapter the matrix
        with an end at the hidden states, which all ranks have."""
        return len(self.adapters) * self.adapter_rank * self.language.hidden

    def of_tensor_rank(self, part: Part, count: float, ranks: int) -> int:
        """How many of `count` parameters of a part are on each of `ranks` ranks that split the layers between them.

        Embedding, head, the matrices of layers and one of each adapter's two are divided, all else is whole (biases are
        taken for whole).
        """
        divided = {
            "tower": self.tower.layers * self.tower.matrices,
            "language_layers": self.language.layers * self.language.matrices,
            "adapters": self.parameters["adapters"] - self.language.layers * self.unsharded_adapters,
            "embedding": self.parameters["embedding"],
            "head": self.parameters["head"],
        }
        share = divided[part] / self.parameters[part] if self.parameters[part] and part in divided else 0.0
        return round(count * (1 - share + share / ranks))


def _on_rank(count: int, divided: int, ranks: int) -> int:
    """Of `count` parameters, of which `divided` are split over `ranks` ranks."""
    return count - divided + round(divided / ranks)
