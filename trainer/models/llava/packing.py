"""Which language models keep samples of one sequence apart."""

from __future__ import annotations

import torch
from torch import nn

from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.models.attention.varlen import takes_samples
from vlmpipe.trainer.models.base import Family
from vlmpipe.trainer.models.layers.parameter_counts import vocabulary_of
from vlmpipe.trainer.models.llava.configuration import text_config

# Kinds of layers in transformers' `layer_types` that see no other sample under a mask.
MASKED = {"full_attention", "sliding_attention", "chunked_attention"}


def require_packable(config: ModelConfig, family: Family) -> None:
    """Raise ConfigError for a language model whose state or window passes from sample to sample.

    Builds it on the meta device, if it has layers other than attention.
    """
    text = text_config(config)
    kinds = set(getattr(text, "layer_types", None) or ())
    if kinds <= MASKED:
        return
    with torch.device("meta"):
        model = family.skeleton(config, vocabulary=vocabulary_of(config, text))
    language_model: nn.Module = family.training_module(config, model, cached=True).language_model
    if not takes_samples(language_model.config):
        raise ConfigError(
            f"a {text.model_type} model lets samples in one sequence see each other (its layers are "
            f"{', '.join(sorted(kinds))})",
            fix="set data.pack to false",
        )
