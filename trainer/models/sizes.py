"""Sizes read off a model's modules and configurations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from torch import nn
from transformers import PreTrainedConfig

from trainer.model_config import ModelConfig
from trainer.models.lora import is_adapter
from trainer.models.shape import Matrices, Part, Stack


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


def vocabulary_of(config: ModelConfig, text: PreTrainedConfig) -> int:
    """Of a tokenizer that is trained, as many entries as it is to have."""
    trained = config.tokenizer.removeprefix("train:")
    return int(trained) if trained != config.tokenizer else int(text.vocab_size)


def part_parameters(language: nn.Module, head: nn.Module, *, tower: int, projector: int, tied: bool) -> dict[Part, int]:
    """Parameters of each part of a model, of which tower and projector are counted already."""
    in_adapters, in_embedding = count_parameters(language, is_adapter), count_parameters(language.embed_tokens)
    return {
        "tower": tower,
        "projector": projector,
        "embedding": in_embedding,
        "language_layers": count_parameters(language) - in_embedding - in_adapters,
        "adapters": in_adapters,
        "head": 0 if tied else count_parameters(head),
    }


def trained_matrices(model: nn.Module) -> tuple[Matrices, ...]:
    """Of a model whose frozen parameters know that they are. A shared one counts once."""
    shapes = Counter(
        (len(parameter), parameter.numel() // len(parameter))
        for parameter in model.parameters()
        if parameter.requires_grad and parameter.ndim > 1
    )
    return tuple(Matrices(rows, columns, count) for (rows, columns), count in sorted(shapes.items()))


def frozen_parts(config: ModelConfig) -> frozenset[Part]:
    """The run file's frozen parts, as those of which sizes are known."""
    frozen: set[Part] = set()
    for name in config.frozen:
        frozen |= {"embedding", "language_layers", "head"} if name == "language_model" else {name}
    return frozenset(frozen)
