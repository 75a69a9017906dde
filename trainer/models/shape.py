"""The sizes of a model that decide what it computes and holds. No torch here: the planner reads these in any place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Part = Literal["tower", "projector", "embedding", "language_layers", "head"]


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


@dataclass(frozen=True)
class ModelShape:
    """A vision-language model: tower, projector, embedding, language layers and head."""

    tower: Stack
    tower_tokens: int  # what the tower runs on for one image, class token included
    image_tokens: int  # what one image takes in a row
    feature_width: int  # numbers of one feature token
    patch_pixels: int  # numbers of one patch: channels x side x side
    language: Stack
    vocabulary: int
    tied_head: bool  # the head's matrix is the embedding's
    parameters: dict[Part, int]  # a tied head has 0 of its own
    frozen: frozenset[Part]

    @property
    def total_parameters(self) -> int:
        return sum(self.parameters.values())

    @property
    def trainable_parameters(self) -> int:
        return sum(count for part, count in self.parameters.items() if part not in self.frozen)
