"""The seam between models and everything else, and the table of families."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import nn

    from trainer.config import ModelConfig


@dataclass(frozen=True)
class Blocks:
    """The parts of a training model that parallelism needs to know, without knowing the model."""

    language_layers: Sequence[nn.Module]  # units for sharding and activation checkpointing
    tower_layers: Sequence[nn.Module]  # empty when the tower is not part of the model (cached features)
    frozen: Sequence[nn.Parameter]  # parameters that never change


class Family(Protocol):
    """What the trainer needs of a model family. `model` is the Hugging Face model, `module` the trainable wrapper."""

    def image_tokens(self, config: ModelConfig, width: int, height: int) -> int: ...
    def feature_width(self, config: ModelConfig) -> int: ...
    def feature_description(self, config: ModelConfig) -> dict[str, Any]: ...
    def image_processor(self, config: ModelConfig) -> Any: ...
    def build(self, config: ModelConfig, tokenizer: Any) -> nn.Module: ...
    def build_tower(self, config: ModelConfig) -> nn.Module: ...
    def encode(self, config: ModelConfig, tower: nn.Module, pixel_values: torch.Tensor) -> torch.Tensor: ...
    def tower(self, model: nn.Module) -> nn.Module: ...
    def project(self, model: nn.Module, features: torch.Tensor) -> torch.Tensor: ...
    def training_module(self, config: ModelConfig, model: nn.Module, *, cached: bool) -> nn.Module: ...
    def blocks(self, module: nn.Module) -> Blocks: ...
    def enable_activation_checkpointing(self, module: nn.Module) -> None: ...
    def export(self, config: ModelConfig, model: nn.Module, tokenizer: Any, folder: Path) -> None: ...
    def load(self, folder: Path) -> nn.Module: ...


def family_of(config: ModelConfig) -> Family:
    """The family that `model.family` names. The import is here because a family needs torch."""
    from trainer.models.llava import LlavaFamily

    families: dict[str, type[Family]] = {"llava": LlavaFamily}
    return families[config.family]()
