"""Selective and full activation checkpointing of layers."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from trainer.models.attention.varlen import ATTEND

aten = torch.ops.aten
# Matrix products, and attention: of samples, and as each device has it.
PRODUCTS = frozenset(
    {
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        ATTEND,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
    }
)


def recompute_layers(language_model: nn.Module, *, selective: bool) -> None:
    """Have a transformers language model compute its blocks again in the backward pass."""
    settings: dict[str, Any] = {"use_reentrant": False}
    if selective:
        settings["context_fn"] = keeping_products
    with warnings.catch_warnings():
        # transformers 5.23 renames this; the older ones that are supported know no other name.
        warnings.simplefilter("ignore", FutureWarning)
        language_model.gradient_checkpointing_enable(settings)
    # With this the library has embeddings need a gradient, which checkpoints that are not reentrant do without: the
    # backward pass would go through layers in front of all that is trained.
    language_model.disable_input_require_grads()


def keeping_products() -> Any:
    """The two contexts that `torch.utils.checkpoint` takes: one for the forward pass, one for computing again."""
    return create_selective_checkpoint_contexts(_policy)


def _policy(_context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE
