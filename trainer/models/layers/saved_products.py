"""What selective activation checkpointing saves: matrix products and attention."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from vlmpipe.trainer.models.attention.varlen import ATTEND

ATEN = torch.ops.aten
# Operations whose results are saved. Modules with operations of their own that multiply matrices add these.
PRODUCTS: list[OpOverload] = [
    ATEN.mm.default,
    ATEN.addmm.default,
    ATEN.bmm.default,
    ATEN._scaled_mm.default,
    ATEN._scaled_dot_product_flash_attention.default,
    ATEN._scaled_dot_product_flash_attention_for_cpu.default,
    ATEN._scaled_dot_product_efficient_attention.default,
    ATEN._scaled_dot_product_cudnn_attention.default,
    ATTEND,
]


class Reuse(TorchDispatchMode):
    """Recomputes a layer; products are found by `mode`, the second of torch's `create_selective_checkpoint_contexts`.

    That mode alone expects the operations of the forward pass, all of them. But ZeRO-3 gathers weights in hooks of a
    layer's modules, or before the layer: some in one pass, others in the other.
    """

    def __init__(self, mode: TorchDispatchMode) -> None:
        super().__init__()
        self._mode = mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in PRODUCTS:
            return self._mode.__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))
