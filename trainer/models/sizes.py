"""Sizes read off a model's modules and configurations."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from transformers import PreTrainedConfig

from trainer.models.lora import is_adapter
from trainer.models.shape import Stack


def count_parameters(module: nn.Module, counts: Callable[[str], bool] = lambda name: True) -> int:
    return sum(parameter.numel() for name, parameter in module.named_parameters() if counts(name))


def stack_of(config: PreTrainedConfig, layer: nn.Module) -> Stack:
    hidden, heads = int(config.hidden_size), int(config.num_attention_heads)
    return Stack(
        layers=int(config.num_hidden_layers),
        hidden=hidden,
        heads=heads,
        kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(config, "head_dim", None) or hidden // heads),
        intermediate=int(config.intermediate_size),
        gated=any("gate_proj" in name or "gate_up_proj" in name for name, _ in layer.named_parameters()),
        layer_parameters=count_parameters(layer, lambda name: not is_adapter(name)),
    )
