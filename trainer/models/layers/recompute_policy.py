"""Parts of a training module that the backward pass recomputes. Imports no torch: the planner reads it."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vlmpipe.trainer.config.train import TrainConfig
from vlmpipe.trainer.config.train_options import Checkpointing
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.models.base import Family

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Recompute:
    """Settings of the run file. They do not change results."""

    layers: Checkpointing = "none"  # train.activation_checkpointing
    offload: bool = False  # train.activation_offloading
    loss_chunk_tokens: int = 0  # label tokens that have logits at a time; 0 means all
    tower: bool = False  # train.tower_activation_checkpointing

    @classmethod
    def of(cls, train: TrainConfig) -> Recompute:
        return cls(
            train.activation_checkpointing,
            train.activation_offloading,
            train.loss_chunk_tokens,
            train.tower_activation_checkpointing,
        )

    def apply(self, family: Family, module: nn.Module) -> None:
        """To be called before a strategy changes the training module.

        Raises ConfigError for a tower whose layers cannot be recomputed.
        """
        if self.tower:
            recompute_tower(family.blocks(module).tower_layers)
        if self.layers != "none":
            language_model = module.language_model
            recompute_layers(language_model, selective=self.layers == "selective")
        if self.offload:
            from vlmpipe.trainer.models.layers.activation_offload import ActivationOffload

            offload = ActivationOffload()
            for layer in language_model.modules():
                if getattr(layer, "gradient_checkpointing", False):
                    layer._gradient_checkpointing_func = offload.around(layer._gradient_checkpointing_func)
        from vlmpipe.trainer.models.loss.chunked_loss import compute_in_chunks, trained_rows_of

        blocks = family.blocks(module)
        if self.loss_chunk_tokens or trained_rows_of(blocks.head) is not None:  # of which chunks alone know
            compute_in_chunks(blocks.loss, blocks.head, self.loss_chunk_tokens or sys.maxsize)


def recompute_layers(language_model: nn.Module, *, selective: bool) -> None:
    """Have a transformers language model recompute its layers in the backward pass.

    `selective` saves the outputs of matrix products and attention.
    """
    settings: dict[str, object] = {"use_reentrant": False}
    if selective:
        from vlmpipe.trainer.models.layers.saved_products import save_products

        settings["context_fn"] = save_products
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # transformers 5.23 renames the method
        language_model.gradient_checkpointing_enable(settings)
    # The line above makes embeddings require a gradient, which only reentrant checkpoints need: the backward pass would
    # go through frozen layers in front of the first trained one.
    language_model.disable_input_require_grads()


def recompute_tower(layers: Sequence[nn.Module]) -> None:
    """Have the layers of a vision encoder recompute themselves in the backward pass, where they are trained.

    In evaluation mode, which is that of frozen towers, they run as they are. Raises ConfigError for layers that are
    not transformers' own.
    """
    from torch.utils.checkpoint import checkpoint
    from transformers.modeling_layers import GradientCheckpointingLayer

    for layer in layers:
        if not isinstance(layer, GradientCheckpointingLayer):
            raise ConfigError(
                f"train.tower_activation_checkpointing: {type(layer).__name__}, a layer of this vision encoder, cannot "
                "be computed again",
                expected="layers that transformers can checkpoint",
                fix="set train.tower_activation_checkpointing to false",
            )
        layer._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=False)
        layer.gradient_checkpointing = True
