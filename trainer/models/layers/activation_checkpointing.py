"""Selective and full activation checkpointing of layers."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from trainer.models.attention.varlen import ATTEND

aten = torch.ops.aten
PRODUCTS = frozenset(  # matrix products and attention
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
    """Have a transformers language model recompute its layers in the backward pass; `selective` keeps `PRODUCTS`."""
    settings: dict[str, Any] = {"use_reentrant": False}
    if selective:
        settings["context_fn"] = _save_products
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # transformers 5.23 renames the method
        language_model.gradient_checkpointing_enable(settings)
    # The line above makes embeddings require a gradient, which only reentrant checkpoints need: the backward pass would
    # go through frozen layers in front of the first trained one.
    language_model.disable_input_require_grads()


def _save_products() -> Any:
    return create_selective_checkpoint_contexts(list(PRODUCTS))
