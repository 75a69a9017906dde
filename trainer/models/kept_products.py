"""Selective activation checkpointing: what costs most to compute is kept, all else of a block is computed again."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

aten = torch.ops.aten
# Matrix products, and attention as each device has it.
PRODUCTS = frozenset(
    {
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
    }
)


def keeping_products() -> Any:
    """The two contexts that `torch.utils.checkpoint` takes: one for the forward pass, one for computing again."""
    return create_selective_checkpoint_contexts(_policy)


def _policy(_context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE
