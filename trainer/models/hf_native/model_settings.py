"""What every family does alike with transformers' models: what an export says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn


def save_model_settings(model: nn.Module, tokenizer: Any, folder: Path) -> None:
    """Write the configuration of the model and of its generation, with the tokenizer's own control tokens."""
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.bos_token_id = tokenizer.bos_token_id
    model.config.dtype, model.config.architectures = "float32", [type(model).__name__]
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
