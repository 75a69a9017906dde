"""Models that compute the prefix that samples share once (`data.share_prefix`)."""

from __future__ import annotations

import torch

from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.data.prefixes.sharing import MEASURED
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.models.attention.varlen import shares_prefixes
from vlmpipe.trainer.models.registry import family_of


def sharing_obstacle(config: ModelConfig) -> str:
    """Why samples of a model cannot share a prefix, or "". Builds it on the meta device only."""
    family = family_of(config)
    vocabulary = family.shape(config).vocabulary
    with torch.device("meta"):
        model = family.skeleton(config, vocabulary=vocabulary)
    module = family.training_module(config, model, cached=False)
    name = type(module.language_model).__name__
    if getattr(module, "sees_images", False):
        return f"{name} has images whose tokens see each other"
    if not shares_prefixes(module.language_model.config):
        return f"{name} has layers that are not plainly causal attention by sample, such as windows or mixers"
    return ""


def require_shared_prefix(config: ModelConfig) -> None:
    """Raise ConfigError for a model whose samples cannot share a prefix."""
    if why := sharing_obstacle(config):
        raise ConfigError(
            f"data.share_prefix is on, and {why}",
            expected="a language model whose tokens attend to all tokens before them in their sample",
            fix=f"set data.share_prefix to off or auto: images are then computed for each sample, and {MEASURED}",
        )
