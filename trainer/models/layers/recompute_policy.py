"""What a training module recomputes in the backward pass. Imports no torch: the planner reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.config.train import Checkpointing, TrainConfig
from trainer.models.base import Family

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Recompute:
    """Settings of the run file. They do not change results."""

    layers: Checkpointing = "none"  # train.activation_checkpointing
    loss_chunk_tokens: int = 0  # label tokens that have logits at a time; 0 means all

    @classmethod
    def of(cls, train: TrainConfig) -> Recompute:
        return cls(train.activation_checkpointing, train.loss_chunk_tokens)

    def apply(self, family: Family, module: nn.Module) -> None:
        """Call it before a strategy changes the training module."""
        if self.layers != "none":
            from trainer.models.layers.activation_checkpointing import recompute_layers

            language_model = getattr(module.model.model, module.language_part)
            recompute_layers(language_model, selective=self.layers == "selective")
        if self.loss_chunk_tokens:
            from trainer.models.layers.chunked_loss import compute_in_chunks

            blocks = family.blocks(module)
            compute_in_chunks(blocks.loss, blocks.head, self.loss_chunk_tokens)
