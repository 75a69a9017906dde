"""The sizes of a model that decide what it computes and holds. No torch here: the planner reads these in any place."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

Part = Literal["tower", "projector", "embedding", "language_layers", "adapters", "head"]


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
    frozen: frozenset[Part]
    behind_features: int = 0  # parameters of the tower behind the layer whose output is used: never trained
    adapters: dict[str, int] = field(default_factory=dict)  # adapted layer -> adapter parameters in one language layer
    adapter_rank: int = 0
    merge: int = 0  # of a native model, the side in patches of a token's square; images then differ in tokens
    levels: int = 1  # outputs of the tower, each with a merger; all but one reach a language layer each (DeepStack)
    windows: Windows | None = None
    projector_layers: int = 2
    trained_matrices: tuple[Matrices, ...] = ()  # what else is trained is vectors
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
        trained = {part: 0 if part in self.frozen else count for part, count in self.parameters.items()}
        if trained["tower"]:
            trained["tower"] -= self.behind_features
        return trained

    def trained_per_layer(self, ranks: int = 1) -> int:
        """Parameters that training changes in one language layer, on each of `ranks` ranks that split it."""
        own = 0 if "language_layers" in self.frozen else self.language.layer_parameters
        adapters = sum(self.adapters.values())
        return self.of_tensor_rank("language_layers", own, ranks) + self.of_tensor_rank("adapters", adapters, ranks)

    @property
    def whole_adapters(self) -> int:
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
            "adapters": self.parameters["adapters"] - self.language.layers * self.whole_adapters,
            "embedding": self.parameters["embedding"],
            "head": self.parameters["head"],
        }
        share = divided[part] / self.parameters[part] if self.parameters[part] and part in divided else 0.0
        return round(count * (1 - share + share / ranks))
