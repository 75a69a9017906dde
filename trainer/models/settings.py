"""What every family does alike with transformers' models: which weights stay as they are, and what an export says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from trainer.models.lora import plain_name


def frozen_weights(model: nn.Module, is_of_tower: Callable[[str], bool]) -> dict[str, Tensor]:
    """Frozen weights outside of the tower, by the names that they have without adapters."""
    return {
        plain_name(name): parameter
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad
        and not is_of_tower(name)
        and name not in model.all_tied_weights_keys  # on the meta device they are not one parameter
    }


def save_model_settings(model: nn.Module, tokenizer: Any, folder: Path) -> None:
    """Write the configuration of the model and of its generation, with the tokenizer's own control tokens."""
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.bos_token_id = tokenizer.bos_token_id
    model.config.dtype, model.config.architectures = "float32", [type(model).__name__]
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
