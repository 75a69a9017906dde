"""Weights in bf16 (`train.precision`), and what then computes in fp32."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from vlmpipe.trainer.config.train_options import Precision


def cast_to_bf16(parameters: Iterable[nn.Parameter]) -> None:
    """Cast weights in place. Buffers, such as frequencies of rotary embeddings, stay fp32."""
    for parameter in parameters:
        parameter.data = parameter.data.bfloat16()


def rest_frozen(module: nn.Module, precision: Precision) -> None:
    """Keep frozen weights in the type that they compute in: nothing updates them, so they need no fp32 masters.

    Digests of frozen weights are those of their fp32 source, taken before (`vlmpipe.trainer.setup.model.build_model`).
    """
    if precision == "bf16":
        cast_to_bf16(parameter for parameter in module.parameters() if not parameter.requires_grad)


def use_tf32(precision: Precision, device: torch.device) -> None:
    """Let products of fp32 matrices and convolutions run in TF32 on GPUs (10 bits of mantissa) where bf16 (7 bits) does
    the rest, and nowhere else: torch's default lets convolutions.
    """
    if device.type == "cuda":
        torch.backends.cudnn.allow_tf32 = precision == "bf16"
        torch.set_float32_matmul_precision("high" if precision == "bf16" else "highest")
