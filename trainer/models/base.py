"""Protocols between model families and the rest of the trainer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from vlmpipe.trainer.sizing.pipeline_partition import Stage

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import BaseImageProcessor

    from vlmpipe.trainer.config.model import ModelConfig
    from vlmpipe.trainer.models.image_inputs import Grid
    from vlmpipe.trainer.models.loss.chunked_loss import TokenLoss
    from vlmpipe.trainer.sizing.flops import SequenceFlops
    from vlmpipe.trainer.sizing.model_shape import ModelShape


@dataclass(frozen=True)
class ShardingUnits:
    """The parts of a training module that strategies need, whatever its family."""

    language_layers: Sequence[nn.Module]  # units of sharding and activation checkpointing
    tower_layers: Sequence[nn.Module]  # empty with cached features
    embedding: nn.Module  # tokens to hidden states
    head: nn.Module  # hidden states to logits; its weight may be the embedding's
    loss: TokenLoss  # (head, hidden states, label tokens) to summed loss
    reduce_to: Callable[[Stage], None]  # removes everything else from the module
    view: Callable[[Stage], nn.Module]  # a new module of this stage, with the same weights
    shards_tower: bool = True  # under tensor parallelism; else each rank has the tower whole
    image_layers: int = 0  # images are also added after this many first language layers (DeepStack)
    sequence_flops: SequenceFlops | None = None  # of a mean sequence of the data, to balance stages
    # Gives parameters on the meta device their values before sharding, see trainer/models/layers/deferred_weights.py.
    fill: Callable[[nn.Module], None] = lambda module: None

    @property
    def is_tied(self) -> bool:
        return self.head.weight is self.embedding.weight

    def layers_in(self, stage: Stage) -> list[nn.Module]:
        """The stage's language layers, then tower layers."""
        tower = self.tower_layers if stage.is_first else []
        return [*(self.language_layers[number] for number in stage.layers), *tower]

    def has_embedding(self, stage: Stage) -> bool:
        """Return whether the stage has the embedding's matrix; a tied last stage has it too."""
        return stage.is_first or (stage.is_last and self.is_tied)


class Weights(Protocol):
    """Weights of a model that need not be in memory as a whole."""

    def read(self, name: str) -> torch.Tensor:
        """A weight by its name in the state dict. Fast in the order of names."""
        ...


class Family(Protocol):
    """Parts of a model family that the trainer needs. model: the Hugging Face model; module: its training module."""

    def require_trainable(self, config: ModelConfig, *, pack: bool, cached: bool) -> str:
        """Raise ConfigError for a model that cannot be trained on such sequences. Returns a remark, empty for none."""
        ...

    def feature_shape(self, config: ModelConfig) -> tuple[int, ...]: ...
    def feature_description(self, config: ModelConfig) -> dict[str, object]: ...
    def image_processor(self, config: ModelConfig) -> BaseImageProcessor: ...
    def build(self, config: ModelConfig, tokenizer: object) -> nn.Module: ...
    def blueprint(self, config: ModelConfig, tokenizer: object, *, buffers: bool = False) -> nn.Module: ...
    def initial_weights(self, config: ModelConfig, tokenizer: object) -> Weights: ...
    def skeleton(
        self,
        config: ModelConfig,
        *,
        vocabulary: int,
        language_layers: int | None = None,
        one_inner_tower_layer: bool = False,
    ) -> nn.Module: ...
    def shape(self, config: ModelConfig) -> ModelShape: ...
    def build_tower(self, config: ModelConfig) -> nn.Module: ...
    def encode(
        self,
        config: ModelConfig,
        tower: nn.Module,
        pixel_values: Any,  # pixels, patches or named inputs: each family's own
        grids: Sequence[Grid] | None = None,
        dtype: torch.dtype = ...,
    ) -> Sequence[torch.Tensor] | torch.Tensor: ...
    def tower(self, model: nn.Module) -> nn.Module: ...
    def project(self, model: nn.Module, features: torch.Tensor) -> torch.Tensor: ...
    def generation_inputs(
        self, model: nn.Module, input_ids: torch.Tensor, projected: torch.Tensor, grids: torch.Tensor | None = None
    ) -> dict[str, object]: ...
    def training_module(self, config: ModelConfig, model: nn.Module, *, cached: bool) -> nn.Module: ...
    def blocks(self, module: nn.Module) -> ShardingUnits: ...
    def save_processor(self, config: ModelConfig, tokenizer: object, folder: Path) -> None: ...
    def load(self, folder: Path, dtype: torch.dtype = ...) -> nn.Module: ...
